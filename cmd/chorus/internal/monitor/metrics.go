package monitor

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/status"
)

// Labels describe the server that exports metrics.
type Labels struct {
	Version string // of chorus
	Exits   *Exits // of the host's processes; may be nil
}

// Exits counts the exits of processes by reason, and their restarts. The zero value has none.
type Exits struct {
	mu       sync.Mutex
	list     map[string]int
	restarts int
}

// exitReasons are the reasons of launch.Config.Exited. A counter that appeared with its first increment
// would hide this increment from Prometheus's increase().
var exitReasons = []string{"ok", "code", "signal", "killed", "stopped"}

// errorReasons are the reasons of status.Errors.
var errorReasons = []string{"timeout", "peer_lost", "mismatch", "async", "refused"}

// Add counts an exit.
func (x *Exits) Add(reason string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.list == nil {
		x.list = map[string]int{}
	}
	x.list[reason]++
}

// AddRestart counts a process that was started again.
func (x *Exits) AddRestart() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.restarts++
}

// counts returns the number of exits for each reason, also those without any, and of restarts.
func (x *Exits) counts() (exits map[string]int, restarts int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	exits = map[string]int{}
	for _, reason := range exitReasons {
		exits[reason] = 0
	}
	maps.Copy(exits, x.list)
	return exits, x.restarts
}

// A collector makes metrics of the job's state when a client scrapes them.
type collector struct {
	source *Source
	labels Labels

	mu    sync.Mutex
	known map[string]map[uint64]bool // the series of each rank that were ever sent, as hashes; "" is the host
	seed  maphash.Seed
}

// maxSeries limits the series of a rank, and of the rest of a host, over the life of this process. Workers choose labels, and new
// ones at each scrape would fill the memory of who stores the metrics. 32 groups that each use 40 combinations of kind, strategy and size have fewer.
const maxSeries = 4096

func newCollector(s *Source, labels Labels) *collector {
	return &collector{source: s, labels: labels, known: map[string]map[uint64]bool{}, seed: maphash.MakeSeed()}
}

// permits reports whether a series of a rank was sent before or is one of the first maxSeries.
func (c *collector) permits(rank, series string) bool {
	h := maphash.String(c.seed, series)
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.known[rank]
	switch {
	case known[h]:
	case len(known) >= maxSeries:
		return false
	case known == nil:
		c.known[rank] = map[uint64]bool{h: true}
	default:
		known[h] = true
	}
	return true
}

// Describe sends nothing: the metrics depend on the job.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics of the job, and of the ranks of this host.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	j, err := c.source.Job(context.Background())
	if err != nil {
		out <- prometheus.NewInvalidMetric(ranksDesc.desc(), err)
		return
	}
	s := &sender{c: c, out: out, job: j.Job}
	for labels := range c.builds(j) {
		s.send(buildDesc, 1, labels[:]...)
	}
	s.send(epochDesc, float64(j.Epoch))
	count := map[string]int{"joining": 0, "running": 0, "lost": 0, "ended": 0}
	for _, r := range j.Ranks {
		count[r.State]++
	}
	for state, n := range count {
		s.send(ranksDesc, float64(n), state)
	}
	s.send(restartsDesc, float64(j.Restarts))
	if x := c.labels.Exits; x != nil {
		exits, restarts := x.counts()
		for reason, n := range exits {
			s.send(exitsDesc, float64(n), c.source.Host(), reason)
		}
		s.send(workerRestartsDesc, float64(restarts), c.source.Host())
	}
	for i := range j.Ranks {
		if r := &j.Ranks[i]; r.Host == c.source.Host() {
			s.rank(r)
		}
	}
}

// builds returns the versions that the ranks of this host use, usually one set: of chorus run, NCCL and
// the driver, and the backend. Versions that no rank has reported are "".
func (c *collector) builds(j *Job) map[[4]string]bool {
	all := map[[4]string]bool{}
	for i := range j.Ranks {
		r := &j.Ranks[i]
		if r.Host == c.source.Host() && len(r.Devices) > 0 {
			all[[4]string{c.labels.Version, r.NCCL, r.Devices[0].Driver, r.Devices[0].Backend}] = true
		}
	}
	if len(all) == 0 {
		all[[4]string{c.labels.Version}] = true
	}
	return all
}

// A desc describes a metric. All metrics have the label chorus_job first.
type desc struct {
	name, help string
	kind       prometheus.ValueType
	labels     []string
}

func (d desc) desc() *prometheus.Desc {
	return prometheus.NewDesc(d.name, d.help, append([]string{"chorus_job"}, d.labels...), nil)
}

// The labels of metrics of a rank, of a rank in a group, of a total, and of a device.
var (
	ofRank   = []string{"rank", "host"}
	ofGroup  = append(ofRank[:2:2], "group")
	ofTotal  = append(ofGroup[:3:3], "op", "strategy", "size")
	ofDevice = append(ofRank[:2:2], "device")
	ofPool   = append(ofDevice[:3:3], "pool")
	ofGPU    = append(ofDevice[:3:3], "uuid", "product", "pci")
)

var (
	buildDesc = desc{"chorus_build_info", "Versions of chorus run, of the NCCL and the CUDA driver that its ranks use, and their backend, always 1.", prometheus.GaugeValue, []string{"version", "nccl", "driver", "backend"}}
	epochDesc = desc{"chorus_epoch", "Epoch of the job.", prometheus.GaugeValue, nil}
	ranksDesc = desc{"chorus_ranks", "Ranks of the job, of all hosts.", prometheus.GaugeValue, []string{"state"}}

	heartbeatDesc = desc{"chorus_heartbeat_age_seconds", "Time since the last message of the rank to the coordinator.", prometheus.GaugeValue, ofRank}
	deviceDesc    = desc{"chorus_device_info", "A device that the rank uses, always 1.", prometheus.GaugeValue, ofGPU}

	operationsDesc = desc{"chorus_collective_operations_total", "Operations that were issued.", prometheus.CounterValue, ofTotal}
	bytesDesc      = desc{"chorus_collective_bytes_total", "Bytes of the operations that were issued, each with its larger buffer.", prometheus.CounterValue, ofTotal}
	groupOpsDesc   = desc{"chorus_group_operations_total", "Operations of the group that were issued, by kind. Unlike chorus_collective_operations_total, it exists for each kind before the first operation, as increase() needs it.", prometheus.CounterValue, append(ofGroup[:3:3], "op")}
	groupBytesDesc = desc{"chorus_group_bytes_total", "Bytes of these operations.", prometheus.CounterValue, append(ofGroup[:3:3], "op")}
	inFlightDesc   = desc{"chorus_collective_in_flight", "Collectives that were issued and have not completed.", prometheus.GaugeValue, ofGroup}
	ageDesc        = desc{"chorus_collective_oldest_age_seconds", "Age of the oldest operation in flight; 0 if none.", prometheus.GaugeValue, ofGroup}
	issuedDesc     = desc{"chorus_collective_issued_sequence", "Number of the last collective that was issued.", prometheus.GaugeValue, ofGroup}
	completedDesc  = desc{"chorus_collective_completed_sequence", "Number of the last collective that is known to have completed.", prometheus.GaugeValue, ofGroup}
	launchedDesc   = desc{"chorus_collective_launched_total", "Collectives that launches of graphs have enqueued; the other counts of collectives lack them.", prometheus.CounterValue, ofGroup}
	launchAgeDesc  = desc{"chorus_launch_wait_seconds", "Time without the end of a launch of a graph with collectives, or of a one-sided operation, while some are pending; 0 if none is.", prometheus.GaugeValue, ofGroup}
	lagDesc        = desc{"chorus_group_lag_operations", "Collectives that the rank is behind the most advanced rank.", prometheus.GaugeValue, ofGroup}
	lagTimeDesc    = desc{"chorus_group_lag_seconds", "Time that the rank is behind the most advanced rank.", prometheus.GaugeValue, ofGroup}

	comparedDesc = desc{"chorus_group_compared_arrivals_total", "Collectives of the group at which the arrivals of its ranks were compared, a sample of all.", prometheus.CounterValue, ofGroup}
	lastDesc     = desc{"chorus_group_last_arrivals_total", "How often the rank arrived last at the collectives that were compared.", prometheus.CounterValue, ofGroup}
	heldUpDesc   = desc{"chorus_group_held_up_seconds_total", "Time for which the other ranks waited only for this rank at the collectives that were compared.", prometheus.CounterValue, ofGroup}

	errorsDesc    = desc{"chorus_collective_errors_total", "Failures of collectives by reason: timeout, peer_lost, mismatch, async, refused.", prometheus.CounterValue, append(ofGroup[:3:3], "reason")}
	durationsDesc = desc{"chorus_collective_duration_seconds", "Time that collectives took on their streams, while a timeline is recorded.", prometheus.UntypedValue, append(ofRank[:2:2], "op", "size")}
	exitsDesc     = desc{"chorus_worker_exits_total", "Exits of the processes of this host by reason: ok, code (not 0), signal, killed by chorus run, or stopped with the job or after another process had failed.", prometheus.CounterValue, []string{"host", "reason"}}

	restartsDesc       = desc{"chorus_restarts_total", "How often all processes of the job were started again.", prometheus.CounterValue, nil}
	workerRestartsDesc = desc{"chorus_worker_restarts_total", "Processes of this host that were started again.", prometheus.CounterValue, []string{"host"}}

	temperatureDesc = desc{"chorus_device_temperature_celsius", "Temperature of the device, from NVML.", prometheus.GaugeValue, ofGPU}
	powerDesc       = desc{"chorus_device_power_watts", "Power draw of the device, from NVML.", prometheus.GaugeValue, ofGPU}
	utilizationDesc = desc{"chorus_device_utilization_ratio", "Part of the last sample period, 0 to 1, in which the device executed a kernel, from NVML.", prometheus.GaugeValue, ofGPU}

	allocatedDesc = desc{"chorus_memory_allocated_bytes", "Memory that the program has allocated, by pool: small, large, or other for allocators without pools.", prometheus.GaugeValue, ofPool}
	reservedDesc  = desc{"chorus_memory_reserved_bytes", "Memory that the allocator has reserved from the driver.", prometheus.GaugeValue, ofPool}
	inactiveDesc  = desc{"chorus_memory_inactive_split_bytes", "Free memory that the allocator cannot release.", prometheus.GaugeValue, ofPool}
	peakDesc      = desc{"chorus_memory_peak_allocated_bytes", "Maximum of the allocated memory of each pool, and of all pools together (all), which may be less than the sum.", prometheus.GaugeValue, ofPool}
	allocsDesc    = desc{"chorus_memory_allocations_total", "Allocations of the program.", prometheus.CounterValue, ofDevice}
	retriesDesc   = desc{"chorus_memory_retries_total", "Allocations that were repeated after the cache was emptied.", prometheus.CounterValue, ofDevice}
	oomsDesc      = desc{"chorus_memory_out_of_memory_total", "Out-of-memory errors.", prometheus.CounterValue, ofDevice}
)

// A sender sends metrics with the label of a job.
type sender struct {
	c    *collector
	out  chan<- prometheus.Metric
	job  string
	who  string // the rank whose metrics are sent, or "" for the host's
	seen map[string]bool
}

// maySend reports whether a metric may be sent. A worker may report one thing twice, and a second metric with the same labels would
// make all metrics of the host invalid; and its labels may be too many.
func (s *sender) maySend(d desc, labels []string) bool {
	key := fmt.Sprintf("%s %q", d.name, labels)
	if s.seen == nil {
		s.seen = map[string]bool{}
	}
	was := s.seen[key]
	s.seen[key] = true
	return !was && s.c.permits(s.who, key)
}

func (s *sender) send(d desc, v float64, labels ...string) {
	if !s.maySend(d, labels) {
		return
	}
	s.out <- prometheus.MustNewConstMetric(d.desc(), d.kind, v, append([]string{s.job}, labels...)...)
}

// sensor sends the value of a sensor in a larger unit, unless the device does not have the sensor.
func (s *sender) sensor(d desc, v *int, unit float64, labels []string) {
	if v != nil {
		s.send(d, float64(*v)/unit, labels...)
	}
}

func (s *sender) rank(r *Rank) {
	labels := []string{strconv.Itoa(r.Rank), r.Host}
	s.who = labels[0]
	of := func(more ...string) []string { return append(labels[:2:2], more...) }
	if r.State == "running" {
		s.send(heartbeatDesc, r.SilentNanos.Seconds(), labels...)
	}
	names := map[string]bool{}
	for i := range r.Groups {
		name := r.Groups[i].label()
		for n := 2; names[name]; n++ {
			name = fmt.Sprintf("%s#%d", r.Groups[i].label(), n) // such as another group of the same size
		}
		names[name] = true
		s.group(&r.Groups[i], of(name))
		for _, reason := range errorReasons {
			if !slices.ContainsFunc(r.Errors, func(e status.Errors) bool { return e.Group == name && e.Reason == reason }) {
				s.send(errorsDesc, 0, of(name, reason)...)
			}
		}
	}
	for _, e := range r.Errors {
		s.send(errorsDesc, float64(e.Count), of(e.Group, e.Reason)...)
	}
	for _, d := range r.Durations {
		s.histogram(&d, of(d.Op, d.Size))
	}
	seen := map[string]bool{}
	for i := range r.Devices {
		if d := &r.Devices[i]; !seen[d.Name] {
			seen[d.Name] = true
			s.device(d, of(d.Name))
			gpu := of(d.Name, d.UUID, d.Product, d.PCI)
			s.send(deviceDesc, 1, gpu...)
			s.sensor(temperatureDesc, d.Temperature, 1, gpu)
			s.sensor(powerDesc, d.PowerDraw, 1000, gpu)
			s.sensor(utilizationDesc, d.Utilization, 100, gpu)
		}
	}
}

// histogram sends durations, in buckets that count all smaller ones, too, as
// Prometheus requires.
func (s *sender) histogram(d *status.Durations, labels []string) {
	if !s.maySend(durationsDesc, labels) {
		return
	}
	buckets, count := map[float64]uint64{}, uint64(0)
	for i, n := range d.Buckets {
		if count += n; i < len(status.DurationBounds) {
			buckets[status.DurationBounds[i]] = count
		}
	}
	s.out <- prometheus.MustNewConstHistogram(durationsDesc.desc(), count, d.Sum, buckets, append([]string{s.job}, labels...)...)
}

// label returns a name of the group that does not change when the job is started again.
func (m *Member) label() string {
	if m.Name != "" {
		return m.Name
	}
	return fmt.Sprintf("ranks-%d", m.Size)
}

func (s *sender) group(m *Member, group []string) {
	age := 0.0
	if m.Oldest != nil {
		age = float64(m.Oldest.AgeNanos) / 1e9
	}
	s.send(inFlightDesc, float64(m.Issued-m.Completed), group...)
	s.send(ageDesc, age, group...)
	s.send(issuedDesc, float64(m.Issued), group...)
	s.send(completedDesc, float64(m.Completed), group...)
	s.send(launchedDesc, float64(m.Launched), group...)
	s.send(launchAgeDesc, float64(m.WaitNanos)/1e9, group...)
	s.send(lagDesc, float64(m.Behind), group...)
	s.send(lagTimeDesc, m.Lag.Seconds(), group...)
	s.send(comparedDesc, float64(m.Tally.Compared), group...)
	s.send(lastDesc, float64(m.Tally.Last), group...)
	s.send(heldUpDesc, m.Tally.HeldUp.Seconds(), group...)
	byKind := map[string]status.Total{}
	for k := collective.AllReduce; k < collective.NumKinds; k++ {
		byKind[k.Label()] = status.Total{}
	}
	for _, t := range m.Totals {
		sum := byKind[t.Op]
		byKind[t.Op] = status.Total{Count: sum.Count + t.Count, Bytes: sum.Bytes + t.Bytes}
	}
	for op, t := range byKind {
		of := append(group[:len(group):len(group)], op)
		s.send(groupOpsDesc, float64(t.Count), of...)
		s.send(groupBytesDesc, float64(t.Bytes), of...)
	}
	for _, t := range m.Totals {
		labels := append(group[:len(group):len(group)], t.Op, t.Strategy, t.Size)
		s.send(operationsDesc, float64(t.Count), labels...)
		s.send(bytesDesc, float64(t.Bytes), labels...)
	}
}

func (s *sender) device(d *status.Device, labels []string) {
	for _, p := range poolsOf(d) {
		of := append(labels[:len(labels):len(labels)], p.Name)
		s.send(allocatedDesc, float64(p.Allocated), of...)
		s.send(reservedDesc, float64(p.Reserved), of...)
		s.send(inactiveDesc, float64(p.InactiveSplit), of...)
		if p.Name != otherPool {
			s.send(peakDesc, float64(p.PeakAllocated), of...)
		}
	}
	s.send(peakDesc, float64(d.PeakAllocated), append(labels[:len(labels):len(labels)], "all")...)
	s.send(allocsDesc, float64(d.Allocations), labels...)
	s.send(retriesDesc, float64(d.Retries), labels...)
	s.send(oomsDesc, float64(d.OutOfMemory), labels...)
}

// otherPool is the label of memory that is in no pool. Its peak is not known.
const otherPool = "other"

// poolsOf returns the pools of a device and the rest of its memory, so that the sum of the pools is the
// memory of the device.
func poolsOf(d *status.Device) []status.Pool {
	rest := status.Pool{Name: otherPool, Allocated: d.Allocated, Reserved: d.Reserved, InactiveSplit: d.InactiveSplit}
	for _, p := range d.Pools {
		rest.Allocated, rest.Reserved, rest.InactiveSplit = rest.Allocated-p.Allocated, rest.Reserved-p.Reserved, rest.InactiveSplit-p.InactiveSplit
	}
	rest.Allocated, rest.Reserved, rest.InactiveSplit = max(rest.Allocated, 0), max(rest.Reserved, 0), max(rest.InactiveSplit, 0)
	return append(d.Pools[:len(d.Pools):len(d.Pools)], rest)
}
