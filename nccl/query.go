package nccl

import (
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// Simulate returns how long NCCL's model says that the operations take that fn issues
// (ncclGroupSimulateEnd). None of them is enqueued. The rest is as with Group, within
// which it cannot be called.
func Simulate(c *Communicator, fn func() error) (d time.Duration, err error) {
	if openGroup() != nil {
		return 0, fmt.Errorf("nccl: ncclGroupSimulateEnd: a group is open: simulate outside of Group")
	}
	err = inGroup(c, fn, func(g *group) error {
		if len(g.ops) == 0 {
			return nil
		}
		if err := g.enter(); err != nil {
			return err
		}
		defer g.exit()
		info := ncclapi.NewSimInfo(c.version)
		if _, err := g.give(c, func(api ncclapi.API) ncclapi.Result { return api.GroupSimulateEnd(info) }); err != nil {
			return err
		}
		d = time.Duration(float64(info.EstimatedTime) * float64(time.Microsecond))
		return nil
	})
	return d, err
}

// MemoryStats is what NCCL has allocated for a communicator on its device, in bytes.
type MemoryStats struct {
	Total      uint64
	Persistent uint64 // stays when the communicator is suspended
	Suspend    uint64 // what Suspend gives back
	Suspended  bool
}

// MemoryStats returns what NCCL has allocated for c (ncclCommMemStats, NCCL 2.29.7 and
// newer).
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

// Properties is what a communicator can do.
type Properties struct {
	DeviceAPI bool // kernels may communicate by themselves
	Multicast bool // NVLink multicast
	LSATeams  int  // groups of ranks that reach each other's memory by load and store
	OneSided  bool // Put, Signal and WaitSignal
}

// Properties returns what c can do (ncclCommQueryProperties, NCCL 2.29.2 and newer).
func (c *Communicator) Properties() (Properties, error) {
	if c == nil {
		return Properties{}, c.closed("ncclCommQueryProperties")
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

func param(dev *device.Device, f ncclapi.Func, fn func(ncclapi.API) ncclapi.Result) error {
	api, err := dev.System().NCCL()
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
	api, err := dev.System().NCCL()
	if err != nil {
		return "", err
	}
	v, r := api.GetVersion()
	if r != ncclapi.Success {
		return "", &Error{Op: "ncclGetVersion", Rank: -1, Device: dev.String(), Err: Result(r)}
	}
	return ncclapi.VersionText(v), nil
}
