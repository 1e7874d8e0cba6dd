package nccl

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/status"
)

// observeTime limits the queries of streams for a status. Without them, completions of the
// last second may be missing.
const observeTime = 200 * time.Millisecond

// registerStatus registers the communicators of the process as a source of the status.
var registerStatus = sync.OnceFunc(func() { status.Add("NCCL", describe) })

// describe adds all communicators that are not closed.
func describe(p *status.Process) {
	observeAll()
	p.NCCL = versionOf(liveMembers())
	for _, r := range liveRecorders() {
		p.Groups = append(p.Groups, groupOf(r))
	}
}

// versionOf returns the version of NCCL that communicators use, or "" if there are none.
func versionOf(list []*member) string {
	for _, m := range list {
		if c := m.comm.Value(); c != nil {
			if v, r := c.api.GetVersion(); r == ncclapi.Success {
				return ncclapi.VersionText(v)
			}
		}
	}
	return ""
}

var observing atomic.Bool

// observeAll records completions, as the watchdog does once a second.
func observeAll() {
	if !observing.CompareAndSwap(false, true) {
		return // it still waits for the driver
	}
	poll.Within(observeTime, func() error {
		defer observing.Store(false)
		observe(liveMembers())
		return nil
	})
}

// observeWithin records the completions of communicators, if the driver answers within d.
func observeWithin(d time.Duration, list []*member) {
	poll.Within(d, func() error {
		observe(list)
		return nil
	})
}

// observe records the completions of communicators.
func observe(list []*member) {
	for _, m := range list {
		if c := m.comm.Value(); c != nil && c.failed.Load() == nil && !c.isClosed() && m.Pending() {
			_, _, _ = c.watch.Observe() // the watchdog reports errors
		}
	}
}

func groupOf(r *collective.Recorder) status.Group {
	s := r.Standing()
	g := status.Group{
		ID: r.Group, Name: r.Name, Rank: r.Rank, Size: r.Size, WorldRank: s.WorldRank, Device: r.Device,
		Issued: s.Issued, Completed: min(s.Completed, s.Issued), IdleNanos: int64(s.Idle),
		Launched: s.Launched, WaitNanos: int64(s.Waits),
	}
	if g.Arrivals = r.Arrivals(); len(g.Arrivals) > 0 {
		g.Clock = collective.Clock()
	}
	if s.State != collective.Scheduled {
		g.State = s.State.String()
	}
	if s.Oldest.Record > 0 {
		g.Oldest = &status.Op{Text: s.Oldest.String(), State: s.Oldest.State, Kind: s.Kind.Plain(), Collective: s.Oldest.Collective, AgeNanos: int64(s.Age)}
	}
	r.Totals(func(k collective.Kind, by collective.Service, size int, t collective.Total) {
		g.Totals = append(g.Totals, status.Total{
			Op: k.Label(), Strategy: strategies[by], Size: collective.SizeNames[size], Count: t.Count, Bytes: t.Bytes,
		})
	})
	return g
}

// strategies are the names of services in metrics.
var strategies = [...]string{collective.NCCL: "nccl", collective.Kernels: "kernels", collective.Windows: "windows", collective.CopyEngines: "copy_engines", collective.Ordered: "ordered"}

// Simulate returns NCCL's estimate of how long the operations that fn adds to
// the batch would take, without enqueueing them (ncclGroupSimulateEnd).
func Simulate(fn func(b *Batch) error) (d time.Duration, err error) {
	err = inBatch("ncclGroupSimulateEnd", fn, func(b *Batch) error {
		d, err = b.simulate()
		return err
	})
	return d, err
}

func (b *Batch) simulate() (time.Duration, error) {
	if len(b.ops) == 0 {
		return 0, nil
	}
	if err := b.prepare(); err != nil {
		return 0, err
	}
	defer b.unlock()
	info := ncclapi.NewSimInfo(b.ops[0].comm.version)
	if err := b.execute(func(api ncclapi.API) ncclapi.Result { return api.GroupSimulateEnd(info) }); err != nil {
		return 0, err
	}
	return time.Duration(float64(info.EstimatedTime) * float64(time.Microsecond)), nil
}

// MemoryStats describes NCCL's memory for a communicator on its device, in bytes.
type MemoryStats struct {
	Total      uint64
	Persistent uint64 // kept while the communicator is suspended
	Suspend    uint64 // freed by Suspend
	Suspended  bool
}

// MemoryStats returns the memory that NCCL has allocated for c (ncclCommMemStats, NCCL
// 2.29.7 and newer).
func (c *Communicator) MemoryStats() (m MemoryStats, err error) {
	const f = ncclapi.FuncCommMemStats
	var suspended uint64
	err = c.manage(f, func() (r ncclapi.Result) {
		for _, q := range []struct {
			stat int32
			to   *uint64
		}{
			{ncclapi.StatGPUMemTotal, &m.Total}, {ncclapi.StatGPUMemPersist, &m.Persistent},
			{ncclapi.StatGPUMemSuspend, &m.Suspend}, {ncclapi.StatGPUMemSuspended, &suspended},
		} {
			if *q.to, r = c.api.CommMemStats(*c.h, q.stat); r != ncclapi.Success {
				return r
			}
		}
		return r
	})
	m.Suspended = suspended != 0
	return m, err
}

// Properties describes the features of a communicator.
type Properties struct {
	DeviceAPI bool // kernels may communicate directly
	Multicast bool // NVLink multicast
	LSATeams  int  // groups of ranks that access each other's memory by load and store
	OneSided  bool // Put, Signal and WaitSignal
}

// Properties returns the features of c (ncclCommQueryProperties, NCCL 2.29.2 and newer).
func (c *Communicator) Properties() (Properties, error) {
	if c == nil {
		return Properties{}, c.errClosed("ncclCommQueryProperties")
	}
	p := ncclapi.NewProperties(c.version)
	err := c.manage(ncclapi.FuncCommQueryProperties, func() ncclapi.Result { return c.api.CommQueryProperties(*c.h, p) })
	return Properties{
		DeviceAPI: p.DeviceAPISupport != 0, Multicast: p.MultimemSupport != 0, LSATeams: int(p.NLSATeams), OneSided: p.HostRMASupport != 0,
	}, err
}

// Parameter returns the value of one of NCCL's parameters, such as NCCL_DEBUG
// (ncclParamGetParameter, NCCL 2.30.4 and newer).
func Parameter(dev *device.Device, key string) (value string, err error) {
	if err := checkText("the key", key); err != nil {
		return "", fmt.Errorf("nccl: parameter: %w: %w", err, ErrorInvalidArgument)
	}
	err = param(dev, ncclapi.FuncParamGetParameter, func(api ncclapi.API) (r ncclapi.Result) {
		value, r = api.ParamGetParameter(key)
		return r
	})
	return value, err
}

// Parameters returns the names of NCCL's parameters (ncclParamGetAllParameterKeys, NCCL
// 2.30.4 and newer).
func Parameters(dev *device.Device) (keys []string, err error) {
	err = param(dev, ncclapi.FuncParamGetAllParameterKeys, func(api ncclapi.API) (r ncclapi.Result) {
		keys, r = api.ParamGetAllParameterKeys()
		return r
	})
	return keys, err
}

// IntParameter returns the value of a parameter that is a number (ncclParamBind and
// ncclParamGetI64, NCCL 2.30.4 and newer).
func IntParameter(dev *device.Device, key string) (value int64, err error) {
	if err := checkText("the key", key); err != nil {
		return 0, fmt.Errorf("nccl: integer parameter: %w: %w", err, ErrorInvalidArgument)
	}
	var p ncclapi.Param
	err = param(dev, ncclapi.FuncParamBind, func(api ncclapi.API) (r ncclapi.Result) {
		p, r = api.ParamBind(key)
		return r
	})
	if err != nil {
		return 0, err
	}
	err = param(dev, ncclapi.FuncParamGetI64, func(api ncclapi.API) (r ncclapi.Result) {
		value, r = api.ParamGetI64(p)
		return r
	})
	return value, err
}

// LogParameters writes the names and values of NCCL's parameters to NCCL's log,
// if NCCL_DEBUG permits it (ncclParamDumpAll, NCCL 2.30.4 and newer).
func LogParameters(dev *device.Device) error {
	return param(dev, ncclapi.FuncParamDumpAll, func(api ncclapi.API) ncclapi.Result { return api.ParamDumpAll() })
}

func param(dev *device.Device, f ncclapi.Func, fn func(ncclapi.API) ncclapi.Result) error {
	if dev == nil {
		return fmt.Errorf("nccl: %s: no device given", f.Name())
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return err
	}
	if !api.Has(f) {
		v, _ := api.GetVersion()
		return needs(f.Name(), f.Since(), v)
	}
	return call(dev, f.Name(), fn)
}

// Version returns the version of the NCCL that dev's System has loaded, such as "2.28.3"
// (ncclGetVersion).
func Version(dev *device.Device) (string, error) {
	if dev == nil {
		return "", errors.New("nccl: version: no device given")
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return "", err
	}
	v, r := api.GetVersion()
	if r != ncclapi.Success {
		return "", &Error{Op: "ncclGetVersion", Rank: -1, Device: dev.String(), Err: Result(r)}
	}
	return ncclapi.VersionText(v), nil
}

// account lets memory.Ledger show the memory that NCCL has allocated for c. It does nothing
// if the loaded NCCL has no such statistic.
func (c *Communicator) account() {
	if c.api.Has(ncclapi.FuncCommMemStats) {
		c.unaccount = inside.Account(c.dev, c.use)
	}
}

// use returns NCCL's memory for c, unless another call of NCCL is in progress.
func (c *Communicator) use() (u inside.Use, known bool) {
	if !c.mu.TryLock() {
		return u, false
	}
	defer c.mu.Unlock()
	if !c.life.TryRLock() { // Shutdown frees the communicator
		return u, false
	}
	defer c.life.RUnlock()
	if !c.alive() {
		return u, false
	}
	bytes, suspended, r := uint64(0), uint64(0), ncclapi.Success
	stat, state := ncclapi.StatGPUMemTotal, ""
	err := relaxed(c.dev, func() error {
		if suspended, r = c.api.CommMemStats(*c.h, ncclapi.StatGPUMemSuspended); suspended != 0 {
			stat, state = ncclapi.StatGPUMemPersist, ", suspended"
		}
		if r == ncclapi.Success {
			bytes, r = c.api.CommMemStats(*c.h, stat)
		}
		return nil
	})
	u = inside.Use{Owner: fmt.Sprintf("NCCL, communicator %d, rank %d of %d%s", c.number, c.rank, c.size, state), Bytes: bytes}
	return u, err == nil && r == ncclapi.Success
}
