package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// A Store is the store of the job.
type Store interface {
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
}

// trips is the number of exchanges of a clock. The fastest one counts.
const trips = 8

// measureClock compares the clock of this host with the clock of rank 0, which answers by
// serveClock.
func measureClock(ctx context.Context, s Store, node int) (*skew, error) {
	var best *skew
	for i := range trips {
		asked := time.Now()
		if err := s.Set(ctx, clockKey("ask", node, i), nil); err != nil {
			return nil, err
		}
		text, err := s.Get(ctx, clockKey("answer", node, i))
		if err != nil {
			return nil, err
		}
		trip := time.Since(asked)
		var then time.Time
		if err := then.UnmarshalText(text); err != nil {
			return nil, fmt.Errorf("health: the clock of rank 0: %w", err)
		}
		if best == nil || trip < best.Trip {
			best = &skew{Offset: then.Sub(asked.Round(0)) - trip/2, Trip: trip} // Round removes the monotonic time
		}
	}
	return best, nil
}

// serveClock answers the questions of one host.
func serveClock(ctx context.Context, s Store, node int) error {
	for i := range trips {
		if _, err := s.Get(ctx, clockKey("ask", node, i)); err != nil {
			return err
		}
		text, err := time.Now().MarshalText()
		if err != nil {
			return err
		}
		if err := s.Set(ctx, clockKey("answer", node, i), text); err != nil {
			return err
		}
	}
	return nil
}

func clockKey(what string, node, i int) string { return fmt.Sprintf("clock/%s/%d/%d", what, node, i) }

// Exchange measures the clocks and the ports of the hosts, numbered from 0 to nodes-1. All hosts
// call it with their facts, which name the reason if the exchange fails.
func Exchange(ctx context.Context, s Store, h *Host, f *Facts, node, nodes int) {
	var wg sync.WaitGroup
	errs := make([]error, nodes+1)
	if node == 0 {
		for n := 1; n < nodes; n++ {
			wg.Go(func() { errs[n] = serveClock(ctx, s, n) })
		}
	} else {
		wg.Go(func() { f.Skew, errs[node] = measureClock(ctx, s, node) })
	}
	errs[nodes] = f.tryPorts(ctx, s, h, node, nodes)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		f.Broken = reasonOf(err)
	}
}

// mostDialed limits the hosts that a host connects to.
const mostDialed = 31

// dialTime limits the time of a connection.
const dialTime = 2 * time.Second

// An endpoint is the address that a host listens on, or "".
type endpoint struct{ Host, Addr string }

// tryPorts listens on a port that the kernel chooses, as NCCL does, and connects to the other
// hosts. It returns when the other hosts have tried this host.
func (f *Facts) tryPorts(ctx context.Context, s Store, h *Host, node, nodes int) error {
	me := endpoint{Host: h.Name}
	l, err := h.listen(ctx)
	if err != nil {
		f.Broken = "no port to listen on: " + reasonOf(err)
	} else {
		defer l.Close()
		go acceptAll(l)
		me.Addr = l.Addr().String()
	}
	text, err := json.Marshal(me)
	if err != nil {
		return err
	}
	if err := s.Set(ctx, fmt.Sprintf("port/%d", node), text); err != nil {
		return err
	}
	for i := 1; i < nodes && i <= mostDialed; i++ {
		if err := f.tryPort(ctx, s, (node+i)%nodes); err != nil {
			return err
		}
	}
	if err := s.Set(ctx, fmt.Sprintf("dialed/%d", node), nil); err != nil {
		return err
	}
	for n := range nodes {
		if _, err := s.Get(ctx, fmt.Sprintf("dialed/%d", n)); err != nil {
			return err
		}
	}
	return nil
}

// tryPort connects to a host and notes a failure.
func (f *Facts) tryPort(ctx context.Context, s Store, node int) error {
	text, err := s.Get(ctx, fmt.Sprintf("port/%d", node))
	if err != nil {
		return err
	}
	var to endpoint
	if err := json.Unmarshal(text, &to); err != nil {
		return fmt.Errorf("health: the address of host %d: %w", node, err)
	}
	if to.Addr == "" { // that host has a reason
		return nil
	}
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "tcp", to.Addr)
	if err != nil {
		f.Ports = append(f.Ports, fmt.Sprintf("host %s at %s: %v", to.Host, to.Addr, err))
		return nil
	}
	return c.Close()
}

// listen listens on the interface that NCCL uses.
func (h *Host) listen(ctx context.Context) (net.Listener, error) {
	chosen, err := h.chosen()
	if err != nil {
		return nil, err
	}
	if len(chosen) == 0 {
		return nil, errors.New("NCCL has no interface (see ifname)")
	}
	for _, a := range chosen[0].Addrs {
		if addr := a.Addr(); !addr.IsLinkLocalUnicast() {
			var lc net.ListenConfig
			return lc.Listen(ctx, "tcp", net.JoinHostPort(addr.String(), "0"))
		}
	}
	return nil, fmt.Errorf("%s has no address of the network", chosen[0].Name)
}

// acceptAll accepts and closes connections until the listener is closed.
func acceptAll(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}

var clockSkew = &Check{
	ID: "clock-skew", Scope: ScopeJob, Source: "clocks of the hosts, exchanged through the job's store",
	Hazard:  "The clocks of the hosts differ, so their logs and traces do not match.",
	compare: compareClocks,
}

// Differences between clocks.
const (
	noticedSkew = 100 * time.Millisecond
	mostSkew    = 5 * time.Second
)

func compareClocks(hosts []*Facts) []Result {
	const want, cause, cure = "less than 100ms", "times in logs and traces of the hosts do not match", "start chronyd on all hosts"
	worst, host := time.Duration(0), ""
	for i, f := range hosts {
		switch {
		case i == 0: // the host of rank 0 has no skew
			continue
		case f.Skew == nil && f.Broken != "":
			return []Result{unknown("host " + f.Host + ": " + f.Broken)}
		case f.Skew == nil:
			return []Result{unknown("host " + f.Host + " did not measure its clock")}
		}
		// A difference within the error of the measurement is not proven.
		if sure := max(f.Skew.Offset.Abs()-f.Skew.Trip/2, 0); sure >= worst {
			worst, host = sure, f.Host
		}
	}
	found := fmt.Sprintf("the clock of host %s differs by %v or more", host, worst.Round(time.Millisecond))
	switch {
	case worst > mostSkew:
		return []Result{fail(found, want, cause+", and certificates and leases may be refused", cure)}
	case worst > noticedSkew:
		return []Result{warn(found, want, cause, cure)}
	}
	return []Result{pass("the largest proven difference is "+worst.Round(time.Millisecond).String(), want)}
}

var clockSync = &Check{
	ID: "clock-sync", Scope: ScopeHost, Source: "adjtimex",
	Hazard: "The clock of the host is not synchronized, so logs of hosts do not match.",
	Run: one(func(h *Host) Result {
		ok, err := h.clockStatus()
		switch {
		case err != nil:
			return unread(err)
		case !ok:
			return warn("not synchronized", "synchronized", "times in logs and traces of several hosts do not match", "start chronyd or systemd-timesyncd")
		}
		return pass("synchronized", "synchronized")
	}),
}

var gpuCount = same(Check{ID: "gpu-count", Source: "NVML", Hazard: "A host has fewer GPUs than the others."}, Fail,
	"ranks without a GPU cannot start, or the job has fewer ranks", "search the kernel's log of the host with fewer GPUs for Xid, and restart it",
	func(_ context.Context, h *Host) (string, error) {
		gpus, err := h.gpus()
		return plural(len(gpus), "GPU"), err
	})

var gpuProducts = same(Check{ID: "gpu-products", Source: "nvmlDeviceGetName", Hazard: "The hosts have different GPUs."}, Warn,
	"all ranks wait for the slowest GPU", "use hosts with equal GPUs",
	func(_ context.Context, h *Host) (string, error) {
		return h.ofGPUs(func(g *gpu) (string, error) { return g.Name() })
	})

var driverVersions = same(Check{ID: "driver-versions", Source: "/proc/driver/nvidia/version", Hazard: "The hosts have different drivers."}, Warn,
	"NCCL and kernels may behave differently on the hosts", "install one version of the driver on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		if reason := h.noGPU(); reason != "" {
			return "", errors.New(reason)
		}
		return h.driverVersion()
	})

var ncclVersions = same(Check{ID: "nccl-versions", Source: "loaded NCCL", Hazard: "The hosts load different versions of NCCL."}, Fail,
	"NCCL's start fails or hangs: all ranks need the same version", "set CHORUS_LIBNCCL to the same file on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		if reason := h.noGPU(); reason != "" {
			return "", errors.New(reason)
		}
		lib, err := h.nccl()
		if err != nil {
			return "", err
		}
		return lib.Version, nil
	})

var powerCaps = same(Check{ID: "power-caps", Source: "nvmlDeviceGetPowerManagementLimit", Hazard: "The hosts limit the power of their GPUs differently."}, Warn,
	"all ranks wait for the GPUs with the lowest limit", "nvidia-smi -pl with one value on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.ofGPUs(func(g *gpu) (string, error) {
			mw, err := g.PowerLimit()
			return fmt.Sprintf("%d W", mw/1000), err
		})
	})

var mtus = same(Check{ID: "mtu", Source: "network interfaces", Hazard: "The hosts have different sizes of packets on NCCL's interface."}, Fail,
	"large packets are lost, and NCCL hangs or ends with an error", "set one MTU on all hosts and switches",
	func(_ context.Context, h *Host) (string, error) {
		i, err := h.firstChosen()
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("MTU %d", i.MTU), nil
	})

var seedNames = same(Check{ID: "seeds", Source: "resolver: CHORUS_SEEDS", Hazard: "A seed has different addresses on the hosts."}, Fail,
	"some hosts do not find the coordinator", "use addresses in --seeds, or correct /etc/hosts",
	func(ctx context.Context, h *Host) (string, error) {
		var parts []string
		for _, s := range h.seeds() {
			addrs, err := h.lookup(ctx, s)
			if err != nil {
				return "", err
			}
			parts = append(parts, fmt.Sprintf("%s is %v", s, addrs))
		}
		if len(parts) == 0 {
			return "no names of seeds", nil
		}
		return strings.Join(parts, ", "), nil
	})

// protocolVariables change the messages between ranks.
var protocolVariables = []string{"NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_CUMEM_ENABLE"}

var protocols = same(Check{ID: "variables-protocol", Source: "environment and files of NCCL", Hazard: "Variables that change NCCL's protocol differ between hosts."}, Fail,
	"NCCL hangs or ends: all ranks need the same algorithm, protocol and network", "set the variables equally on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.settingsText(func(name string) bool { return slices.Contains(protocolVariables, name) })
	})

// hostVariables differ between hosts by design.
var hostVariables = []string{"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE", "NCCL_RAS_ADDR"}

var otherVariables = same(Check{ID: "variables-differ", Source: "environment and files of NCCL", Hazard: "Other variables of NCCL differ between hosts."}, Warn,
	"the hosts run at different speeds, or use different resources", "set the variables equally on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.settingsText(func(name string) bool {
			return strings.HasPrefix(name, "NCCL_") && !slices.Contains(protocolVariables, name) && !slices.Contains(hostVariables, name)
		})
	})

// settingsText lists the wanted variables.
func (h *Host) settingsText(wanted func(name string) bool) (string, error) {
	all, err := h.ncclSettings()
	if err != nil {
		return "", err
	}
	var parts []string
	for name, s := range all {
		if wanted(name) {
			parts = append(parts, name+"="+s.value)
		}
	}
	if len(parts) == 0 {
		return "none is set", nil
	}
	slices.Sort(parts)
	return strings.Join(parts, " "), nil
}

// ofGPUs lists the different values of the GPUs.
func (h *Host) ofGPUs(value func(g *gpu) (string, error)) (string, error) {
	gpus, err := h.gpus()
	if err != nil {
		return "", err
	}
	var list []string
	for _, g := range gpus {
		v, err := value(g)
		if err != nil {
			return "", err
		}
		if !slices.Contains(list, v) {
			list = append(list, v)
		}
	}
	slices.Sort(list)
	return strings.Join(list, ", "), nil
}

// Facts are the values of one host that a job compares.
type Facts struct {
	Host   string          `json:"host"`
	Values map[string]fact `json:"values"`           // by the name of the check
	Skew   *skew           `json:"skew,omitempty"`   // nil: not measured
	Ports  []string        `json:"ports,omitempty"`  // hosts that did not answer, with the reason
	Broken string          `json:"broken,omitempty"` // why the exchange with the other hosts failed
}

// A fact is a value, or the reason for its absence.
type fact struct {
	Value   string `json:"value,omitempty"`
	Missing string `json:"missing,omitempty"`
}

// A skew is the difference between the clocks of rank 0 and of a host. It is known up to half of
// the round trip.
type skew struct {
	Offset time.Duration `json:"offset"`
	Trip   time.Duration `json:"trip"`
}

// Facts reads the values of this host for the checks that compare hosts.
func (h *Host) Facts(ctx context.Context, checks []*Check) *Facts {
	f := &Facts{Host: h.Name, Values: map[string]fact{}}
	for _, c := range checks {
		if c.value == nil {
			continue
		}
		type answer struct {
			value string
			err   error
		}
		answers := make(chan answer, 1) // a call of a broken driver may never return
		go func() {
			v, err := c.value(ctx, h)
			answers <- answer{v, err}
		}()
		select {
		case a := <-answers:
			if a.err != nil {
				f.Values[c.ID] = fact{Missing: reasonOf(a.err)}
			} else {
				f.Values[c.ID] = fact{Value: a.value}
			}
		case <-ctx.Done():
			f.Values[c.ID] = fact{Missing: "no answer in time"}
		}
	}
	return f
}

// Compare runs the checks that compare hosts.
func Compare(checks []*Check, hosts []*Facts) []Result {
	var all []Result
	for _, c := range checks {
		if c.compare == nil {
			continue
		}
		begin := time.Now()
		for _, r := range c.compare(hosts) {
			r.ID, r.Scope, r.Source, r.Took = c.ID, c.Scope, c.Source, time.Since(begin)
			all = append(all, r)
		}
	}
	safe.Record(&all)
	return all
}

// same returns a check that all hosts have an equal value. id is the name of the check, which is the
// key of the value.
func same(c Check, verdict Verdict, cause, cure string, value func(ctx context.Context, h *Host) (string, error)) *Check {
	c.Scope, c.value = ScopeJob, value
	c.compare = func(hosts []*Facts) []Result {
		var values []string
		byValue := map[string][]string{}
		for _, f := range hosts {
			v, ok := f.Values[c.ID]
			switch {
			case !ok:
				return []Result{unknown("host " + f.Host + " has no value: it runs another version of chorus, or other checks")}
			case v.Missing != "":
				return []Result{unknown("host " + f.Host + ": " + v.Missing)}
			}
			if byValue[v.Value] == nil {
				values = append(values, v.Value)
			}
			byValue[v.Value] = append(byValue[v.Value], f.Host)
		}
		const want = "the same on all hosts"
		if len(values) <= 1 {
			return []Result{pass(strings.Join(values, ""), want)}
		}
		slices.SortFunc(values, func(a, b string) int { return len(byValue[a]) - len(byValue[b]) }) // the exceptions first
		parts := make([]string, len(values))
		for i, v := range values {
			parts[i] = fmt.Sprintf("%s: %s", hostText(byValue[v]), v)
		}
		return []Result{{Verdict: verdict, Found: strings.Join(parts, "; "), Want: want, Cause: cause, Cure: cure}}
	}
	return &c
}
