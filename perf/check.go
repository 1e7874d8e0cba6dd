package perf

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/safe"
)

// A CheckConfig configures [Check]; nil means the quick profile with the usual limits. It must be the same on all
// processes, except for Store and Log.
type CheckConfig struct {
	// Limits decide what is slow.
	Limits Limits
	// MaxBytes is the largest all-reduce, and the size of a transfer between two ranks. 0 means 256 MiB, and
	// 16 KiB on virtual devices.
	MaxBytes int
	// MemoryBytes is the part of each GPU's memory that is tested. 0 means 256 MiB, and 64 KiB on virtual devices.
	MemoryBytes int
	// Iterations are the timed operations of each measurement. 0 means 5.
	Iterations int
	// StepTimeout limits each step: the test of the devices, each round of pairs, and the all-reduce. What has not
	// finished by then is reported as hanging. 0 means 30 s.
	StepTimeout time.Duration
	// Store connects the processes of a group of several processes: a cluster.Session or its Prefix. It tells the
	// ranks apart when NCCL hangs, so it is required for such groups.
	Store Store
	// Log receives a record for each step, and each finding as a warning. nil means no log.
	Log *slog.Logger
}

// A Store is the store of the job, such as cluster.Store.
type Store interface {
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
}

// A CheckReport is the result of [Check].
type CheckReport struct {
	Time      time.Time      `json:"start_time"`
	Backend   string         `json:"backend"`
	NCCL      string         `json:"nccl_version,omitempty"`
	GPUs      []GPU          `json:"gpus"` // by rank
	Devices   []DeviceResult `json:"devices,omitempty"`
	Pairs     []PairResult   `json:"pairs,omitempty"`
	AllReduce *Report        `json:"all_reduce,omitempty"`
	Findings  []Finding      `json:"findings"`
	Skipped   []string       `json:"skipped,omitempty"` // steps that did not run, each with the reason
	Took      float64        `json:"took_seconds"`
}

// OK reports whether nothing was found.
func (r *CheckReport) OK() bool { return len(r.Findings) == 0 }

// Of returns the findings that name a GPU, by its rank. A GPU without findings has passed the steps that ran.
func (r *CheckReport) Of(rank int) (list []Finding) {
	for _, f := range r.Findings {
		if slices.ContainsFunc(f.GPUs, func(g GPU) bool { return g.Rank == rank }) {
			list = append(list, f)
		}
	}
	return list
}

// CheckDevices is [Check] for devices of this process: it creates a group of
// them, and closes it. With one device it runs only the test of the device.
func CheckDevices(ctx context.Context, devs []*device.Device, cfg *CheckConfig) (*CheckReport, error) {
	c, err := newChecker(devs, cfg)
	if err != nil {
		return nil, err
	}
	hosts, err := describeDevices(devs, 0)
	if err != nil {
		return nil, err
	}
	c.report.GPUs = hosts
	if !c.devices(ctx, nil) || len(devs) == 1 {
		if len(devs) == 1 {
			c.skip("pairs and all-reduce: one GPU has no peer")
		}
		return c.finish(ctx)
	}
	g, err := comm.Local(ctx, devs, nil)
	if err != nil {
		c.found(Finding{Kind: Broken, Step: "group", Reason: "the group of the GPUs cannot be created: " + err.Error()})
		return c.finish(ctx)
	}
	defer g.Close()
	c.collectives(ctx, g)
	return c.finish(ctx)
}

// Check tests the GPUs of a group and the links between them, and names what is wrong, slow or hanging. All ranks
// call it with the same configuration. The steps are:
//
//   - devices: each GPU alone. Memory is filled, copied and compared; data is copied from and to pinned host memory
//     and compared; a matrix product is compared with a reference, if cuBLASLt is there.
//   - pairs: each two ranks exchange data, in rounds in which all ranks are busy. On several hosts, the GPUs of a
//     host exchange data with each other, and then with the GPU of the same local rank of each other host.
//   - all-reduce: from 8 bytes to MaxBytes, over all ranks, with the results compared.
//
// The report is the same on all ranks. Other ranks may still be in the last step when Check returns: leave the group
// with Shutdown, because Close would break it for them. A step that hangs ends the check, after which the group is
// broken and must be closed. The error does not depend on the findings: it reports that the check itself could not run, for
// example because ctx has ended.
func Check(ctx context.Context, g *comm.Group, cfg *CheckConfig) (*CheckReport, error) {
	if g == nil {
		return nil, errNoGroup
	}
	devs := make([]*device.Device, g.Locals())
	for i := range devs {
		devs[i] = g.Device(i)
	}
	c, err := newChecker(devs, cfg)
	if err != nil {
		return nil, err
	}
	if c.cfg.Store == nil && g.Locals() < g.Size() {
		return nil, fmt.Errorf("perf: check: the group has %d processes or more, and the configuration has no Store", g.Size()/g.Locals())
	}
	c.first, c.size = g.Rank(), g.Size()
	local, err := localGPUs(g)
	if err != nil {
		return nil, err
	}
	all, err := exchange(ctx, c, "gpus", local)
	if err != nil {
		return nil, err
	}
	c.report.GPUs = flatten(all)
	if c.devices(ctx, g) {
		c.collectives(ctx, g)
	}
	return c.finish(ctx)
}

// A checker runs one check of the local ranks.
type checker struct {
	cfg    CheckConfig
	devs   []*device.Device
	first  int // the first local rank
	size   int // ranks of the group
	report *CheckReport
	begun  time.Time
	steps  int // exchanges so far, which number the keys of the store
}

func newChecker(devs []*device.Device, cfg *CheckConfig) (*checker, error) {
	c := &checker{devs: devs, size: len(devs), begun: time.Now()}
	c.cfg = *cmp.Or(cfg, new(CheckConfig))
	if len(devs) == 0 {
		return nil, errors.New("perf: check: no devices")
	}
	if c.cfg.MaxBytes < 0 || c.cfg.MemoryBytes < 0 || c.cfg.Iterations < 0 || c.cfg.StepTimeout < 0 {
		return nil, fmt.Errorf("perf: check: %d bytes, %d bytes of memory, %d iterations, step timeout %v: want no negative number",
			c.cfg.MaxBytes, c.cfg.MemoryBytes, c.cfg.Iterations, c.cfg.StepTimeout)
	}
	if err := c.cfg.Limits.Check(); err != nil {
		return nil, fmt.Errorf("perf: check: %w", err)
	}
	most, memory := 256<<20, 256<<20
	c.report = &CheckReport{Time: time.Now().UTC().Truncate(time.Second), Backend: devs[0].System().Backend(), Findings: []Finding{}}
	if c.report.Backend != gpu.CUDA {
		most, memory = 16<<10, 64<<10
	}
	c.cfg.MaxBytes, c.cfg.MemoryBytes = cmp.Or(c.cfg.MaxBytes, most), cmp.Or(c.cfg.MemoryBytes, memory)
	c.cfg.Iterations, c.cfg.StepTimeout = cmp.Or(c.cfg.Iterations, 5), cmp.Or(c.cfg.StepTimeout, 30*time.Second)
	if c.cfg.Log == nil {
		c.cfg.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// measured reports whether the times of the devices are meaningful.
func (c *checker) measured() bool { return c.report.Backend == gpu.CUDA }

func (c *checker) found(list ...Finding) { c.report.Findings = append(c.report.Findings, list...) }

func (c *checker) skip(reason string) {
	c.report.Skipped = append(c.report.Skipped, reason)
	c.cfg.Log.Info("skipped", "reason", reason)
}

// finish completes the report.
func (c *checker) finish(ctx context.Context) (*CheckReport, error) {
	r := c.report
	r.Took = time.Since(c.begun).Seconds()
	safe.Record(&r.Findings)
	for _, f := range r.Findings {
		c.cfg.Log.Warn("finding", "kind", string(f.Kind), "step", f.Step, "reason", f.Reason, "gpus", names(f.GPUs), "hosts", f.Hosts)
	}
	c.cfg.Log.Info("checked", "ok", r.OK(), "findings", len(r.Findings), "seconds", r.Took)
	if err := context.Cause(ctx); err != nil {
		return r, fmt.Errorf("perf: check: %w", err)
	}
	return r, nil
}

func names(list []GPU) []string {
	out := make([]string, len(list))
	for i, g := range list {
		out[i] = g.String()
	}
	return out
}

// step returns the context of a step.
func (c *checker) step(ctx context.Context, name string) (context.Context, context.CancelFunc) {
	c.cfg.Log.Info("step", "name", name)
	return context.WithTimeoutCause(ctx, c.cfg.StepTimeout, errStep)
}

// errStep ends a step that takes too long.
var errStep = errors.New("no result within the limit of a step")

// A message has the values of the local ranks of a process.
type message[T any] struct {
	First  int `json:"first"`
	Values []T `json:"values"`
}

// exchange returns the values of all processes by their first rank. It is nil for the ranks of a process that did
// not answer in time.
func exchange[T any](ctx context.Context, c *checker, name string, mine []T) (map[int][]T, error) {
	all := map[int][]T{c.first: mine}
	if len(mine) == c.size {
		return all, nil
	}
	c.steps++
	key := func(rank int) string { return fmt.Sprintf("check/%d/%s/%d", c.steps, name, rank) }
	for i := range mine { // each rank has a key: processes may have different numbers of ranks
		text, err := json.Marshal(message[T]{First: c.first, Values: mine[i : i+1]})
		if err != nil {
			return nil, err
		}
		if err := c.cfg.Store.Set(ctx, key(c.first+i), text); err != nil {
			return nil, fmt.Errorf("perf: check: the result of rank %d: %w", c.first+i, err)
		}
	}
	// The others may still be in the step, and have the time of the step to end it.
	limited, cancel := context.WithTimeout(ctx, 2*c.cfg.StepTimeout)
	defer cancel()
	for rank := range c.size {
		if rank >= c.first && rank < c.first+len(mine) {
			continue
		}
		text, err := c.cfg.Store.Get(limited, key(rank))
		if err != nil {
			if limited.Err() != nil && ctx.Err() == nil {
				continue
			}
			return nil, fmt.Errorf("perf: check: the result of rank %d: %w", rank, err)
		}
		var m message[T]
		if err := json.Unmarshal(text, &m); err != nil || len(m.Values) != 1 {
			return nil, fmt.Errorf("perf: check: the result of rank %d is not readable: all processes need the same version of chorus", rank)
		}
		safe.Record(&m.Values)
		all[rank] = m.Values
	}
	return all, nil
}

// flatten returns values by rank, from lists whose keys are the first ranks of
// their processes.
func flatten[T any](all map[int][]T) []T {
	var list []T
	firsts := make([]int, 0, len(all))
	for first := range all {
		firsts = append(firsts, first)
	}
	slices.Sort(firsts)
	for _, first := range firsts {
		list = append(list, all[first]...)
	}
	return list
}

// collectives measures pairs of ranks, and then all together.
func (c *checker) collectives(ctx context.Context, g *comm.Group) {
	if r, err := Describe(g); err == nil {
		c.report.NCCL = r.NCCL
	}
	if g.Size() == 1 {
		c.skip("pairs and all-reduce: one rank has no peer")
		return
	}
	if !c.pairs(ctx, g) {
		c.skip("all-reduce: a transfer between two ranks did not finish")
		return
	}
	c.allReduce(ctx, g)
}

// allReduce measures all ranks together.
func (c *checker) allReduce(ctx context.Context, g *comm.Group) {
	limited, cancel := c.step(ctx, "all-reduce")
	defer cancel()
	p := &Plan{Operations: []string{"all_reduce"}, MinBytes: 8, MaxBytes: max(c.cfg.MaxBytes, 8), StepFactor: 32, Iterations: c.cfg.Iterations, Warmups: 1, Checks: 1}
	r, err := Run(limited, g, p, nil)
	if r != nil {
		r.Verdict = nil // the findings are the verdict
		c.report.AllReduce = r
	}
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, errStep):
		c.found(Finding{Kind: Hang, Step: "all-reduce", Reason: fmt.Sprintf("the all-reduce of all %d ranks did not finish within %v, although every pair did", g.Size(), c.cfg.StepTimeout),
			Cure: "read the flight recorders (chorus analyze) to see which rank is behind"})
	case err != nil:
		c.found(Finding{Kind: Broken, Step: "all-reduce", Reason: "the all-reduce failed: " + err.Error()})
	default:
		c.found(judgeAllReduce(c.report.GPUs, r, c.limits())...)
	}
}

// limits returns the limits in force: those of the products apply only if times are meaningful.
func (c *checker) limits() Limits {
	l := c.cfg.Limits
	if c.measured() {
		l = l.withDefaults(c.report.GPUs, c.cfg.MaxBytes)
	}
	return l
}
