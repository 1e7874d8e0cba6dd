// Package status describes one process of a job for `chorus status`: the progress of its
// collectives and the memory of its devices. Packages register sources. The sources run only
// when the coordinator asks, so that operations do not pay for them.
package status

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// Limits of a status. They bound the memory for the status of a hostile process, and the
// number of metrics.
const (
	MaxBytes   = 64 << 10 // encoded
	maxGroups  = 32
	maxDevices = 64
	maxTotals  = 128 // of a group
	maxArrived = 64  // arrivals of a group
	maxUses    = 32  // of a device
	maxPools   = 8   // of a device
	maxNotes   = 8
	maxErrors  = 128 // counts of errors
	maxTimes   = 128 // histograms
	maxText    = 256 // bytes of a text
)

// A Process is the status of a process.
type Process struct {
	Groups  []Group  `json:"groups,omitempty"`
	Devices []Device `json:"devices,omitempty"`
	Notes   []string `json:"notes,omitempty"` // parts that are missing, and why
	NCCL    string   `json:"nccl,omitempty"`  // version, if the process has a communicator

	Errors    []Errors    `json:"errors,omitempty"`
	Durations []Durations `json:"durations,omitempty"` // only while a timeline is recorded
}

// Errors counts the failures of a group's collectives for one reason.
type Errors struct {
	Group  string `json:"group"`
	Reason string `json:"reason"` // "timeout", "peer_lost", "mismatch", "async" or "refused"
	Count  uint64 `json:"count"`
}

// DurationBounds are the upper bounds of the buckets of Durations, in seconds. The last bucket has no
// bound.
var DurationBounds = [11]float64{10e-6, 40e-6, 160e-6, 640e-6, 2.56e-3, 10.24e-3, 40.96e-3, 163.84e-3, 0.65536, 2.62144, 10}

// Durations is a histogram of the times that collectives took on their streams.
type Durations struct {
	Op      string                          `json:"op"`
	Size    string                          `json:"size"`
	Sum     float64                         `json:"sum_seconds"`
	Buckets [len(DurationBounds) + 1]uint64 `json:"buckets"` // each counts only its own
}

// Add adds a duration.
func (d *Durations) Add(seconds float64) {
	i, _ := slices.BinarySearch(DurationBounds[:], seconds)
	d.Buckets[i]++
	d.Sum += seconds
}

// A Group is the progress of one rank of a communicator.
type Group struct {
	ID        string `json:"id"` // the same on all ranks of the communicator
	Name      string `json:"name,omitempty"`
	Rank      int    `json:"rank"` // in the communicator
	Size      int    `json:"size"`
	WorldRank int    `json:"world_rank"` // -1 if not known
	Device    string `json:"device"`
	State     string `json:"state,omitempty"` // how the communicator ended, such as "failed"
	// Issued and Completed are numbers of collectives, from 1; 0 means none.
	Issued    uint64  `json:"issued"`
	Completed uint64  `json:"completed"`
	Oldest    *Op     `json:"oldest,omitempty"` // the oldest operation in flight
	IdleNanos int64   `json:"idle_ns"`          // since the last operation was issued; 0 if there was none
	Totals    []Total `json:"totals,omitempty"`
	// Launched is the number of collectives that launches of graphs have enqueued, which Issued does not have. WaitNanos is for how long
	// no launch is known to have ended while some are pending, or one-sided operations; 0 if none is.
	Launched  uint64 `json:"launched,omitempty"`
	WaitNanos int64  `json:"launch_wait_ns,omitempty"`
	// Arrivals are the latest collectives at which all ranks wait for each other, in ascending order. Each has its number, the time
	// of the call on Clock, and the time that it took on its stream, in nanoseconds. A time that is not known is 0.
	Arrivals [][3]int64 `json:"arrivals,omitempty"`
	Clock    string     `json:"clock,omitempty"` // equal for ranks that share a clock
}

// An Op is an operation in flight.
type Op struct {
	Text       string `json:"text"`            // such as "ncclAllReduce(1024 x float32, sum) as collective 7"
	Kind       string `json:"kind"`            // such as "all-reduce"
	State      string `json:"state,omitempty"` // "queued" or "started", or "scheduled" if that is not known
	Collective uint64 `json:"collective"`
	AgeNanos   int64  `json:"age_ns"`
}

// A Total counts the operations of one kind, backend and class of sizes that were issued.
type Total struct {
	Op       string `json:"op"`       // such as "all_reduce"
	Strategy string `json:"strategy"` // such as "nccl"
	Size     string `json:"size"`     // such as "le_1MiB"
	Count    uint64 `json:"count"`
	Bytes    uint64 `json:"bytes"`
}

// A Device is the memory of a device that the process uses, with the sensor values of the device.
type Device struct {
	Name          string `json:"name"` // such as "cuda:0"
	UUID          string `json:"uuid,omitempty"`
	Product       string `json:"product,omitempty"`
	PCI           string `json:"pci,omitempty"`
	Backend       string `json:"backend,omitempty"` // "cuda" or "virtual"
	Driver        string `json:"driver,omitempty"`  // the newest CUDA that it supports, such as "13.0"
	Allocated     int64  `json:"allocated_bytes"`
	Reserved      int64  `json:"reserved_bytes"`
	InactiveSplit int64  `json:"inactive_split_bytes"`
	PeakAllocated int64  `json:"peak_allocated_bytes"`
	Allocations   int64  `json:"allocations"`
	Retries       int64  `json:"retries"`
	OutOfMemory   int64  `json:"out_of_memory"`
	Total         uint64 `json:"total_bytes"` // of the device
	Free          uint64 `json:"free_bytes"`  // for all processes
	Uses          []Use  `json:"uses,omitempty"`
	Pools         []Pool `json:"pools,omitempty"`
	Utilization   *int   `json:"utilization_percent,omitempty"`
	Temperature   *int   `json:"temperature_celsius,omitempty"`
	PowerDraw     *int   `json:"power_draw_milliwatts,omitempty"`
	ClockRate     *int   `json:"clock_rate_mhz,omitempty"`
}

// A Pool is the part of a device's memory that the allocator keeps for blocks of one class of sizes.
type Pool struct {
	Name          string `json:"name"` // such as "small"
	Allocated     int64  `json:"allocated_bytes"`
	Reserved      int64  `json:"reserved_bytes"`
	InactiveSplit int64  `json:"inactive_split_bytes"`
	PeakAllocated int64  `json:"peak_allocated_bytes"`
}

// A Use is a part of a device's memory.
type Use struct {
	Owner string `json:"owner"`
	Bytes uint64 `json:"bytes"`
}

// encode returns the status with at most MaxBytes. It drops details if necessary.
func (p *Process) encode() []byte {
	p.limit()
	for _, drop := range []func(){func() {}, p.dropArrivals, p.dropUses, p.dropTotals, func() { *p = Process{Notes: []string{"the status is too long"}} }} {
		drop()
		if b, err := json.Marshal(p); err == nil && len(b) <= MaxBytes {
			return b
		}
	}
	return nil
}

func (p *Process) dropArrivals() {
	for i := range p.Groups {
		p.Groups[i].Arrivals = nil
	}
}

func (p *Process) dropUses() {
	for i := range p.Devices {
		p.Devices[i].Uses = nil
	}
}

func (p *Process) dropTotals() {
	for i := range p.Groups {
		p.Groups[i].Totals = nil
	}
}

// limit shortens the lists. The newest groups stay.
func (p *Process) limit() {
	p.Groups = p.Groups[max(0, len(p.Groups)-maxGroups):]
	p.Devices = p.Devices[:min(len(p.Devices), maxDevices)]
	p.Notes = p.Notes[:min(len(p.Notes), maxNotes)]
	p.Errors = p.Errors[:min(len(p.Errors), maxErrors)]
	p.Durations = p.Durations[:min(len(p.Durations), maxTimes)]
	for i := range p.Errors {
		p.Errors[i].Group = short(p.Errors[i].Group)
	}
	slices.SortFunc(p.Errors, Errors.compare)
	slices.SortFunc(p.Durations, Durations.compare)
	for i := range p.Notes {
		p.Notes[i] = short(p.Notes[i])
	}
	for i := range p.Groups {
		g := &p.Groups[i]
		g.Name, g.Totals = short(g.Name), g.Totals[:min(len(g.Totals), maxTotals)]
		slices.SortFunc(g.Totals, Total.compare)
	}
	for i := range p.Devices {
		d := &p.Devices[i]
		d.Uses = d.Uses[:min(len(d.Uses), maxUses)]
		for k := range d.Uses {
			d.Uses[k].Owner = short(d.Uses[k].Owner)
		}
	}
}

// short returns a text of graphic characters with at most maxText bytes.
func short(s string) string {
	s = safe.Text(s[:min(len(s), maxText)])
	return s[:min(len(s), maxText)]
}

// Decode returns the status that another process has encoded. It refuses unknown fields,
// long lists and texts, and negative sizes. Control characters in texts become escapes.
func Decode(b []byte) (*Process, error) {
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("status of %d bytes: want at most %d", len(b), MaxBytes)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	p := new(Process)
	if err := d.Decode(p); err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("status: more bytes follow it")
	}
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	safe.Record(p)
	return p, nil
}

func (p *Process) check() error {
	if err := checkTexts(p.NCCL); err != nil {
		return err
	}
	if len(p.Groups) > maxGroups || len(p.Devices) > maxDevices || len(p.Notes) > maxNotes {
		return fmt.Errorf("%d groups, %d devices and %d notes: want at most %d, %d and %d",
			len(p.Groups), len(p.Devices), len(p.Notes), maxGroups, maxDevices, maxNotes)
	}
	if err := checkTexts(p.Notes...); err != nil {
		return err
	}
	if err := p.checkCounts(); err != nil {
		return err
	}
	for i := range p.Groups {
		if err := p.Groups[i].check(); err != nil {
			return fmt.Errorf("group %d: %w", i, err)
		}
	}
	for i := range p.Devices {
		if err := p.Devices[i].check(); err != nil {
			return fmt.Errorf("device %d: %w", i, err)
		}
	}
	return nil
}

// checkCounts checks the errors and the durations.
func (p *Process) checkCounts() error {
	if len(p.Errors) > maxErrors || len(p.Durations) > maxTimes {
		return fmt.Errorf("%d counts of errors and %d histograms: want at most %d and %d", len(p.Errors), len(p.Durations), maxErrors, maxTimes)
	}
	for i, e := range p.Errors {
		if i > 0 && p.Errors[i-1].compare(e) >= 0 {
			return errors.New("counts of errors are not in order, or repeat")
		}
		if err := checkTexts(e.Group, e.Reason); err != nil {
			return err
		}
	}
	for i, d := range p.Durations {
		if i > 0 && p.Durations[i-1].compare(d) >= 0 {
			return errors.New("histograms are not in order, or repeat")
		}
		if d.Sum < 0 {
			return fmt.Errorf("durations with the sum %g s", d.Sum)
		}
		if err := checkTexts(d.Op, d.Size); err != nil {
			return err
		}
	}
	return nil
}

// compare orders the counts of errors.
func (e Errors) compare(f Errors) int {
	return cmp.Or(cmp.Compare(e.Group, f.Group), cmp.Compare(e.Reason, f.Reason))
}

// compare orders the histograms.
func (d Durations) compare(e Durations) int {
	return cmp.Or(cmp.Compare(d.Op, e.Op), cmp.Compare(d.Size, e.Size))
}

func (g *Group) check() error {
	switch {
	case g.Size < 1 || g.Rank < 0 || g.Rank >= g.Size || g.WorldRank < -1:
		return fmt.Errorf("rank %d of %d, world rank %d", g.Rank, g.Size, g.WorldRank)
	case g.Completed > g.Issued || g.IdleNanos < 0 || g.WaitNanos < 0:
		return fmt.Errorf("%d of %d collectives have completed, idle for %d ns, waits for launches for %d ns", g.Completed, g.Issued, g.IdleNanos, g.WaitNanos)
	case len(g.Totals) > maxTotals:
		return fmt.Errorf("%d totals: want at most %d", len(g.Totals), maxTotals)
	}
	if o := g.Oldest; o != nil {
		if o.AgeNanos < 0 {
			return fmt.Errorf("an operation with the age %d ns", o.AgeNanos)
		}
		if err := checkTexts(o.Text, o.Kind); err != nil {
			return err
		}
	}
	if len(g.Arrivals) > maxArrived {
		return fmt.Errorf("%d arrivals: want at most %d", len(g.Arrivals), maxArrived)
	}
	for i, a := range g.Arrivals {
		if a[0] < 1 || a[1] < 0 || a[2] < 0 || i > 0 && g.Arrivals[i-1][0] >= a[0] {
			return fmt.Errorf("arrival %d at collective %d after %d, called at %d ns, took %d ns: want ascending collectives and no negative times", i, a[0], g.Arrivals[max(i-1, 0)][0], a[1], a[2])
		}
	}
	for i, t := range g.Totals {
		if i > 0 && g.Totals[i-1].compare(t) >= 0 {
			return errors.New("totals are not in order, or repeat")
		}
		if err := checkTexts(t.Op, t.Strategy, t.Size); err != nil {
			return err
		}
	}
	return checkTexts(g.ID, g.Name, g.Device, g.State, g.Clock)
}

// compare orders the totals of a group.
func (t Total) compare(u Total) int {
	return cmp.Or(cmp.Compare(t.Op, u.Op), cmp.Compare(t.Strategy, u.Strategy), cmp.Compare(t.Size, u.Size))
}

func (d *Device) check() error {
	if err := checkNumbers(d.Allocated, d.Reserved, d.InactiveSplit, d.PeakAllocated, d.Allocations, d.Retries, d.OutOfMemory); err != nil {
		return err
	}
	if len(d.Uses) > maxUses || len(d.Pools) > maxPools {
		return fmt.Errorf("%d uses and %d pools: want at most %d and %d", len(d.Uses), len(d.Pools), maxUses, maxPools)
	}
	if err := d.checkPools(); err != nil {
		return err
	}
	for _, u := range d.Uses {
		if err := checkTexts(u.Owner); err != nil {
			return err
		}
	}
	return checkTexts(d.Name, d.UUID, d.Product, d.PCI, d.Backend, d.Driver)
}

func (d *Device) checkPools() error {
	seen := map[string]bool{}
	for _, p := range d.Pools {
		if p.Name != "small" && p.Name != "large" || seen[p.Name] {
			return fmt.Errorf("the pool %q: want small and large, each at most once", p.Name)
		}
		seen[p.Name] = true
		if err := errors.Join(checkTexts(p.Name), checkNumbers(p.Allocated, p.Reserved, p.InactiveSplit, p.PeakAllocated)); err != nil {
			return err
		}
	}
	return nil
}

func checkNumbers(list ...int64) error {
	for _, n := range list {
		if n < 0 {
			return fmt.Errorf("a negative number of bytes or allocations: %d", n)
		}
	}
	return nil
}

func checkTexts(texts ...string) error {
	for _, s := range texts {
		if len(s) > maxText {
			return fmt.Errorf("a text of %d bytes: want at most %d", len(s), maxText)
		}
	}
	return nil
}

// A Source adds its part to an empty status.
type Source func(*Process)

// sources are the registered sources, oldest first.
var sources struct {
	mu   sync.Mutex
	list []*registered
}

// A registered source runs at most once at a time: a source may hang in a driver.
type registered struct {
	name string
	read Source
	busy chan struct{} // has an element during a run
}

// Add registers a source. The name appears in the status if the source does not answer in
// time. The caller must call remove when the source ends.
func Add(name string, read Source) (remove func()) {
	r := &registered{name: name, read: read, busy: make(chan struct{}, 1)}
	sources.mu.Lock()
	defer sources.mu.Unlock()
	sources.list = append(sources.list, r)
	return func() {
		sources.mu.Lock()
		defer sources.mu.Unlock()
		sources.list = slices.DeleteFunc(slices.Clone(sources.list), func(q *registered) bool { return q == r })
	}
}

// Take asks all sources at the same time, and returns the encoded status. Parts of sources
// that need longer than limit are missing.
func Take(limit time.Duration) []byte {
	sources.mu.Lock()
	list := slices.Clone(sources.list)
	sources.mu.Unlock()
	late, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	parts := make([]chan Process, len(list))
	for i, r := range list {
		parts[i] = r.start(late)
	}
	var all Process
	for i, part := range parts {
		if !all.add(part, late) {
			all.Notes = append(all.Notes, list[i].name+" did not answer in time: the driver may hang")
		}
	}
	return all.encode()
}

// add adds the part of a source, unless late ends first.
func (p *Process) add(part <-chan Process, late context.Context) bool {
	var q Process
	select {
	case q = <-part:
	default:
		select {
		case q = <-part:
		case <-late.Done():
			return false
		}
	}
	p.Groups, p.Devices, p.Notes = append(p.Groups, q.Groups...), append(p.Devices, q.Devices...), append(p.Notes, q.Notes...)
	p.NCCL = cmp.Or(p.NCCL, q.NCCL)
	p.Errors, p.Durations = append(p.Errors, q.Errors...), append(p.Durations, q.Durations...)
	return true
}

// start runs the source on a goroutine, unless another run of it lasts until late ends. The
// channel has room for the result.
func (r *registered) start(late context.Context) chan Process {
	part := make(chan Process, 1)
	go func() {
		select {
		case r.busy <- struct{}{}:
		case <-late.Done():
			return
		}
		var p Process
		r.read(&p)
		<-r.busy
		part <- p
	}()
	return part
}
