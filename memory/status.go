package memory

import (
	"fmt"
	"weak"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/status"
)

// register adds the heap to the status of the process. It does not keep the heap alive.
func (h *heap) register() {
	of := weak.Make(h)
	h.forget = status.Add("the memory of "+h.dev.String(), func(p *status.Process) {
		if h := of.Value(); h != nil {
			h.describe(p)
		}
	})
}

// describe adds the memory and the sensor values of the heap's device to the status of the process.
func (h *heap) describe(p *status.Process) {
	if h.closed.Load() {
		return
	}
	d := status.Device{Name: h.dev.String()}
	if s, err := StatsOf(h.dev); err == nil {
		d.Allocated, d.PeakAllocated = current(s.AllocatedBytes.All.Current), current(s.AllocatedBytes.All.Peak)
		d.Reserved, d.InactiveSplit = current(s.ReservedBytes.All.Current), current(s.InactiveSplitBytes.All.Current)
		d.Pools = []status.Pool{s.pool("small", smallPool), s.pool("large", largePool)}
		d.Allocations, d.Retries, d.OutOfMemory = current(s.Allocation.All.Allocated), current(s.AllocRetries), current(s.OOMs)
	}
	if u, err := Ledger(h.dev); err == nil {
		d.Total, d.Free = u.Total, u.Free
		for _, x := range bySize(u.Uses) {
			d.Uses = append(d.Uses, status.Use{Owner: x.Owner, Bytes: x.Bytes})
		}
	}
	if props, err := h.dev.Properties(); err == nil {
		d.UUID, d.Product, d.PCI = props.UUID, props.Name, props.PCIBusID
	}
	sys := gpu.DeviceOf(h.dev).System()
	d.Backend = sys.Name
	if v, r := sys.Driver.DriverGetVersion(); r == cudadrv.Success {
		d.Driver = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	d.Utilization, d.Temperature = sensor(h.dev.Utilization), sensor(h.dev.Temperature)
	d.PowerDraw, d.ClockRate = sensor(h.dev.PowerDraw), sensor(h.dev.ClockRate)
	p.Devices = append(p.Devices, d)
}

func smallPool(p *PoolStats) *Stat { return &p.Small }
func largePool(p *PoolStats) *Stat { return &p.Large }

// pool returns the bytes of a pool.
func (s *Stats) pool(name string, of func(*PoolStats) *Stat) status.Pool {
	return status.Pool{Name: name, Allocated: current(of(&s.AllocatedBytes).Current), PeakAllocated: current(of(&s.AllocatedBytes).Peak),
		Reserved: current(of(&s.ReservedBytes).Current), InactiveSplit: current(of(&s.InactiveSplitBytes).Current)}
}

// current returns a statistic that is not below 0: resets may make it negative.
func current(n int64) int64 { return max(n, 0) }

// sensor returns the value of a sensor, or nil if the device does not have it.
func sensor(read func() (int, error)) *int {
	v, err := read()
	if err != nil {
		return nil
	}
	return &v
}
