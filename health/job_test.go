package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A memoryStore is a store within one process.
type memoryStore struct {
	mu     sync.Mutex
	values map[string][]byte
	news   chan struct{} // closed at the next change
}

func newStore() *memoryStore {
	return &memoryStore{values: map[string][]byte{}, news: make(chan struct{})}
}

func (s *memoryStore) Set(_ context.Context, key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[key] = append([]byte{}, value...)
	close(s.news)
	s.news = make(chan struct{})
	return nil
}

func (s *memoryStore) Get(ctx context.Context, key string) ([]byte, error) {
	for {
		s.mu.Lock()
		v, ok := s.values[key]
		news := s.news
		s.mu.Unlock()
		if ok {
			return v, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: %w", key, ctx.Err())
		}
	}
}

// exchanged returns the facts of three hosts that exchange over the loopback interface.
func exchanged(t *testing.T, change func(node int, w *world)) []*Facts {
	t.Helper()
	s := newStore()
	hosts := make([]*Facts, 3)
	var wg sync.WaitGroup
	for i := range hosts {
		w := healthy()
		w.Name = string(rune('a' + i))
		w.nics = []nic{{"ens3", 1500, true, prefixes("127.0.0.1/8")}}
		change(i, w)
		hosts[i] = &Facts{Host: w.Name}
		wg.Go(func() { Exchange(t.Context(), s, w.Host, hosts[i], i, len(hosts)) })
	}
	wg.Wait()
	return hosts
}

func TestExchange(t *testing.T) {
	hosts := exchanged(t, func(int, *world) {})
	require.Nil(t, hosts[0].Skew)
	for _, f := range hosts {
		require.Empty(t, f.Ports)
		require.Empty(t, f.Broken)
	}
	for _, f := range hosts[1:] {
		require.Positive(t, f.Skew.Trip)
		require.LessOrEqual(t, f.Skew.Offset.Abs(), f.Skew.Trip, "the hosts have one clock")
	}
}

// A host that cannot listen has the reason, and the others do not try it.
func TestExchangeWithoutPort(t *testing.T) {
	hosts := exchanged(t, func(node int, w *world) {
		switch node {
		case 1:
			w.nics[0].Addrs = prefixes("192.0.2.1/32") // not an address of this machine
		case 2:
			w.nics[0].Addrs = prefixes("fe80::1/64")
		}
	})
	require.Empty(t, hosts[0].Broken)
	require.Contains(t, hosts[1].Broken, "no port to listen on: listen tcp 192.0.2.1:0")
	require.Equal(t, "no port to listen on: ens3 has no address of the network", hosts[2].Broken)
	for _, f := range hosts {
		require.Empty(t, f.Ports)
	}
	results := Compare([]*Check{ports}, hosts)
	require.Equal(t, []Verdict{Unknown, Unknown}, verdicts(results))
}

// A host that does not come breaks the exchange, and the comparisons are unknown.
func TestExchangeWithoutAHost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	w := healthy()
	w.nics = []nic{{"ens3", 1500, true, prefixes("127.0.0.1/8")}}
	f := &Facts{Host: "b"}
	Exchange(ctx, newStore(), w.Host, f, 1, 2)
	require.Contains(t, f.Broken, context.DeadlineExceeded.Error())
	for _, c := range []*Check{clockSkew, ports} {
		r := Compare([]*Check{c}, []*Facts{{Host: "a"}, f})[0]
		require.Equal(t, Unknown, r.Verdict)
		require.Contains(t, r.Cause, "host b: ")
	}
}

func TestDialFails(t *testing.T) {
	s := newStore()
	require.NoError(t, s.Set(t.Context(), "port/1", []byte(`{"Host":"b","Addr":"127.0.0.1:1"}`)))
	f := &Facts{}
	require.NoError(t, f.tryPort(t.Context(), s, 1))
	require.Len(t, f.Ports, 1)
	require.Contains(t, f.Ports[0], "host b at 127.0.0.1:1: ")
}

func TestClockSync(t *testing.T) {
	try(t, clockSync,
		change{"free", func(w *world) { w.clockStatus = func() (bool, error) { return false, nil } }, Warn, "chronyd"},
		change{"refused", func(w *world) { w.clockStatus = func() (bool, error) { return false, fs.ErrPermission } }, Unknown, "permission"},
	)
}

// compared returns the result of a check for hosts a, b and c after a change of c.
func compared(t *testing.T, c *Check, changeC func(w *world)) Result {
	t.Helper()
	var hosts []*Facts
	for _, name := range []string{"a", "b", "c"} {
		w := healthy()
		w.Name = name
		if name == "c" {
			changeC(w)
		}
		text, err := json.Marshal(w.Facts(t.Context(), Checks)) // as hosts send them
		require.NoError(t, err)
		f := new(Facts)
		require.NoError(t, json.Unmarshal(text, f))
		hosts = append(hosts, f)
	}
	results := Compare([]*Check{c}, hosts)
	require.Len(t, results, 1)
	require.Empty(t, results[0].Host)
	return results[0]
}

func TestCompare(t *testing.T) {
	for _, x := range []struct {
		check *Check
		make  func(w *world)
		want  Verdict
		found string
	}{
		{gpuCount, func(w *world) { w.gpus = w.gpus[:1] }, Fail, "host c: 1 GPU; hosts a, b: 2 GPUs"},
		{gpuProducts, func(w *world) { w.gpus[1].name = "NVIDIA L4" }, Warn, "host c: NVIDIA H200, NVIDIA L4; hosts a, b: NVIDIA H200"},
		{driverVersions, func(w *world) { w.put("proc/driver/nvidia/version", "Module 570.86.10 x") }, Warn, "host c: 570.86.10; hosts a, b: 580.159.04"},
		{ncclVersions, func(w *world) { w.nccl = func() (*library, error) { return &library{"", "2.28.9"}, nil } }, Fail, "host c: 2.28.9; hosts a, b: 2.28.3"},
		{powerCaps, func(w *world) { w.gpus[0].limit = 500000 }, Warn, "host c: 500 W, 700 W; hosts a, b: 700 W"},
		{mtus, func(w *world) { w.nics[2].MTU = 1500 }, Fail, "host c: MTU 1500; hosts a, b: MTU 9000"},
		{subnets, func(w *world) { w.nics[2].Addrs = prefixes("10.9.0.7/24") }, Warn, "host c: network 10.9.0.0/24; hosts a, b: network 10.0.0.0/24"},
		{seedNames, func(w *world) { w.Env["CHORUS_SEEDS"] = "node1" }, Fail, "host c: node1 is [10.0.0.7]; hosts a, b: no names of seeds"},
		{protocols, func(w *world) { w.Env["NCCL_PROTO"] = "Simple" }, Fail, "host c: NCCL_PROTO=Simple; hosts a, b: none is set"},
		{otherVariables, func(w *world) { w.put("etc/nccl.conf", "NCCL_NTHREADS=64\nNCCL_SOCKET_IFNAME=ens") }, Warn, "host c: NCCL_NTHREADS=64; hosts a, b: none is set"},
	} {
		require.Equal(t, Pass, compared(t, x.check, func(*world) {}).Verdict, x.check.ID)
		r := compared(t, x.check, x.make)
		require.Equal(t, x.want, r.Verdict, x.check.ID)
		require.Equal(t, x.found, r.Found, x.check.ID)
		require.NotEmpty(t, r.Cure)
	}
}

// A value that a host could not read is unknown, with the host and the reason.
func TestCompareUnread(t *testing.T) {
	for c, reason := range map[*Check]string{gpuCount: "this host has no NVIDIA GPU", gpuProducts: "this host has no NVIDIA GPU", powerCaps: "this host has no NVIDIA GPU",
		driverVersions: "this host has no NVIDIA GPU", ncclVersions: "this host has no NVIDIA GPU", mtus: "no netlink", subnets: "no netlink", seedNames: "no such host", protocols: "not a regular file", otherVariables: "not a regular file"} {
		r := compared(t, c, func(w *world) {
			w.withoutGPU()
			w.interfaces = func() ([]nic, error) { return nil, errors.New("no netlink") }
			w.deny("etc/nccl.conf")
			w.Env["CHORUS_SEEDS"] = "nowhere"
		})
		require.Equal(t, Unknown, r.Verdict, c.ID)
		require.Contains(t, r.Cause, "host c", c.ID)
		require.Contains(t, r.Cause, reason, c.ID)
	}
	r := compared(t, ncclVersions, func(w *world) {
		w.nccl = func() (*library, error) {
			return nil, errors.New("no usable library; tried:\n\t/usr/lib: no such file")
		}
	})
	require.Equal(t, "host c: no usable library", r.Cause)
	r = Compare([]*Check{gpuCount}, []*Facts{{Host: "a"}})[0]
	require.Contains(t, r.Cause, "host a has no value")
}

func TestClockSkew(t *testing.T) {
	for _, x := range []struct {
		skew *skew
		want Verdict
		text string
	}{
		{&skew{time.Millisecond, 4 * time.Millisecond}, Pass, "0s"},
		{&skew{-300 * time.Millisecond, 10 * time.Millisecond}, Warn, "the clock of host b differs by 295ms or more"},
		{&skew{300 * time.Millisecond, time.Second}, Pass, "0s"},
		{&skew{time.Minute, 0}, Fail, "1m0s"},
		{nil, Unknown, "host b did not measure its clock"},
	} {
		r := Compare([]*Check{clockSkew}, []*Facts{{Host: "a"}, {Host: "b", Skew: x.skew}, {Host: "c", Skew: &skew{}}})[0]
		require.Equal(t, x.want, r.Verdict)
		require.Contains(t, r.Found+r.Cause, x.text)
	}
}

func TestPorts(t *testing.T) {
	hosts := []*Facts{{Host: "a"}, {Host: "b"}}
	require.Equal(t, Pass, Compare([]*Check{ports}, hosts)[0].Verdict)
	hosts[1].Ports = []string{"host a: connection refused"}
	r := Compare([]*Check{ports}, hosts)
	require.Len(t, r, 1)
	require.Equal(t, []any{Fail, "b", "host a: connection refused"}, []any{r[0].Verdict, r[0].Host, r[0].Found})
}
