package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/nvml"
)

// A Device is one GPU, or one virtual device. There is one *Device for each
// ordinal of a System, so two devices are the same if the pointers are.
type Device struct {
	ref
	sys  *System
	lost atomic.Pointer[Error] // the first sticky error
}

type ref = gpu.DeviceRef

// System returns the set of devices that d belongs to.
func (d *Device) System() *System { return d.sys }

// Ordinal returns the device's number, from 0.
func (d *Device) Ordinal() int { return gpu.DeviceOf(d).Ordinal() }

// String returns "cuda:0" or "virtual:0".
func (d *Device) String() string { return gpu.DeviceOf(d).String() }

// Name returns the product name, such as "NVIDIA H200".
func (d *Device) Name() (string, error) {
	return ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (string, cudadrv.Result) { return drv.DeviceGetName(h) })
}

// Active reports whether the device has a primary context in this process, created by Chorus or
// by another library (torch's _cuda_hasPrimaryContext). Finding, opening and describing a
// device does not create a context: the first call that needs a context creates it.
func (d *Device) Active() (bool, error) {
	active, err := ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (int32, cudadrv.Result) {
		_, active, r := drv.DevicePrimaryCtxGetState(h)
		return active, r
	})
	return active != 0, err
}

// Sync waits until all work on all streams of the device has completed, like
// torch.cuda.synchronize. If ctx ends first, Sync returns its cause; the work
// continues, and one OS thread stays blocked until it completes. Prefer
// Stream.Sync, which blocks no thread.
func (d *Device) Sync(ctx context.Context) error {
	if err := gpu.DeviceOf(d).RefuseSync("device: synchronize " + d.String()); err != nil {
		return err
	}
	wait := func() error {
		return gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	}
	if ctx.Done() == nil {
		return wait()
	}
	gaveUp := func() error { return fmt.Errorf("device: synchronize %s: %w", d, context.Cause(ctx)) }
	if ctx.Err() != nil {
		return gaveUp() // return without waiting
	}
	done := make(chan error, 1)
	go func() { done <- wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return gaveUp()
	}
}

// MemoryInfo returns the free and the total memory of the device in bytes, as
// the driver sees them, like torch.cuda.mem_get_info.
func (d *Device) MemoryInfo() (free, total uint64, err error) {
	bytes, err := gpu.ValueInTime(gpu.DeviceOf(d), func(drv cudadrv.Driver) ([2]uint64, cudadrv.Result) {
		f, t, r := drv.MemGetInfo()
		return [2]uint64{uint64(f), uint64(t)}, r
	})
	return bytes[0], bytes[1], err
}

// Err returns the sticky error that made the device unusable for the process, or nil. Err does
// not query the driver, so it knows only errors that a call has returned.
func (d *Device) Err() error {
	if e := d.lost.Load(); e != nil {
		return e
	}
	return nil
}

// ask calls the driver for the device, without a context.
func ask[T any](d *Device, call func(drv cudadrv.Driver, h cudadrv.Device) (T, cudadrv.Result)) (v T, err error) {
	g := gpu.DeviceOf(d)
	err = g.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		v, r = call(drv, g.Handle())
		return r
	})
	return v, err
}

// A Feature is a hardware feature that devices have from a compute capability on. A
// program may define more features.
type Feature struct {
	Name         string
	Major, Minor int // the first compute capability that has it
}

// The features that programs check to choose number types.
var (
	TensorCores = Feature{"tensor cores", 7, 0}
	BFloat16    = Feature{"bfloat16 arithmetic", 8, 0}  // torch.cuda.is_bf16_supported, without emulation
	TF32        = Feature{"TF32 matrix products", 8, 0} // torch.cuda.is_tf32_supported
	Float8      = Feature{"8-bit float matrix products", 8, 9}
)

// Supports reports whether the device has a feature, without creating a
// context.
func (d *Device) Supports(f Feature) (bool, error) {
	major, minor, err := d.Capability()
	if err != nil {
		return false, err
	}
	return major > f.Major || major == f.Major && minor >= f.Minor, nil
}

// Require returns an *UnsupportedError if the device lacks a feature.
func (d *Device) Require(f Feature) error {
	ok, err := d.Supports(f)
	if err != nil || ok {
		return err
	}
	arch, err := d.Arch()
	if err != nil {
		return err
	}
	return &UnsupportedError{Feature: f.Name, Need: fmt.Sprintf("a device of sm_%d%d or newer", f.Major, f.Minor),
		Have: fmt.Sprintf("%s of %s", d, arch)}
}

// Arch returns the architecture that code for the device is compiled for, such as "sm_90":
// an entry of torch.cuda.get_arch_list.
func (d *Device) Arch() (string, error) {
	major, minor, err := d.Capability()
	return fmt.Sprintf("sm_%d%d", major, minor), err
}

// OrVirtual is Default for programs that are also useful without a GPU, such as the
// examples: if CHORUS_BACKEND permits it and no GPU is visible, it opens virtual devices.
// note is then a line for the user that says so, and empty otherwise.
func OrVirtual() (s *System, note string, err error) {
	c, err := gpu.ChooseBackend()
	if err != nil {
		return nil, "", err
	}
	if c.NoGPU == "" {
		s, err = Default()
		return s, "", err
	}
	s, err = NewSystem(&SystemConfig{Backend: c.Backend, VirtualDevices: c.Devices})
	return s, c.Note("virtual devices"), err
}

type currentKey struct{}

// NewContext returns a context with dev as the current device, for code that uses torch's
// current device (torch.cuda.device). It does not affect the thread and creates no
// CUDA context. stream.NewContext also sets the device of its stream.
func NewContext(ctx context.Context, dev *Device) context.Context {
	return context.WithValue(ctx, currentKey{}, dev)
}

// Current returns the device that NewContext made current, or nil if there is
// none, where torch.cuda.current_device would return the first device.
func Current(ctx context.Context) *Device {
	d, _ := ctx.Value(currentKey{}).(*Device)
	return d
}

// Properties are constant properties of a device; torch.cuda.get_device_properties.
type Properties struct {
	Name                 string `json:"name"`
	UUID                 string `json:"uuid"`       // as nvidia-smi prints it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
	PCIBusID             string `json:"pci_bus_id"` // such as "0000:1b:00.0"
	Major                int    `json:"major"`      // compute capability
	Minor                int    `json:"minor"`
	TotalMemory          uint64 `json:"total_memory"` // bytes
	Multiprocessors      int    `json:"multiprocessors"`
	ThreadsPerMultiproc  int    `json:"threads_per_multiprocessor"`
	ThreadsPerBlock      int    `json:"threads_per_block"`
	WarpSize             int    `json:"warp_size"`
	L2CacheSize          int    `json:"l2_cache_size"`               // bytes
	SharedMemoryPerBlock int    `json:"shared_memory_per_block"`     // bytes
	SharedMemoryPerMulti int    `json:"shared_memory_per_multiproc"` // bytes
	ClockRateKHz         int    `json:"clock_rate_khz"`
	MemoryClockRateKHz   int    `json:"memory_clock_rate_khz"`
	MemoryBusWidthBits   int    `json:"memory_bus_width_bits"`
	MemoryPoolsSupported bool   `json:"memory_pools_supported"`
}

// Properties queries the driver for all properties, without creating a context.
func (d *Device) Properties() (*Properties, error) {
	p := new(Properties)
	var err error
	if p.Name, err = d.Name(); err != nil {
		return nil, err
	}
	if p.UUID, err = gpu.DeviceOf(d).UUID(); err != nil {
		return nil, err
	}
	p.PCIBusID, err = ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (string, cudadrv.Result) { return drv.DeviceGetPCIBusID(h) })
	if err != nil {
		return nil, err
	}
	total, err := ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (uintptr, cudadrv.Result) { return drv.DeviceTotalMem(h) })
	if err != nil {
		return nil, err
	}
	p.TotalMemory = uint64(total)
	if err := p.attributes(d); err != nil {
		return nil, err
	}
	return p, nil
}

// attributes queries the attributes, which are numbers.
func (p *Properties) attributes(d *Device) (err error) {
	pools := 0
	for _, a := range []struct {
		to   *int
		attr cudadrv.Attribute
	}{
		{&p.Major, cudadrv.AttrComputeCapabilityMajor},
		{&p.Minor, cudadrv.AttrComputeCapabilityMinor},
		{&p.Multiprocessors, cudadrv.AttrMultiprocessorCount},
		{&p.ThreadsPerMultiproc, cudadrv.AttrMaxThreadsPerMultiprocessor},
		{&p.ThreadsPerBlock, cudadrv.AttrMaxThreadsPerBlock},
		{&p.WarpSize, cudadrv.AttrWarpSize},
		{&p.L2CacheSize, cudadrv.AttrL2CacheSize},
		{&p.SharedMemoryPerBlock, cudadrv.AttrMaxSharedMemoryPerBlock},
		{&p.SharedMemoryPerMulti, cudadrv.AttrMaxSharedMemoryPerSM},
		{&p.ClockRateKHz, cudadrv.AttrClockRate},
		{&p.MemoryClockRateKHz, cudadrv.AttrMemoryClockRate},
		{&p.MemoryBusWidthBits, cudadrv.AttrGlobalMemoryBusWidth},
		{&pools, cudadrv.AttrMemoryPoolsSupported},
	} {
		if *a.to, err = d.attribute(a.attr); err != nil {
			return err
		}
	}
	p.MemoryPoolsSupported = pools != 0
	return nil
}

// Capability returns the compute capability, such as 9, 0 for an H200; it
// mirrors torch.cuda.get_device_capability.
func (d *Device) Capability() (major, minor int, err error) {
	if major, err = d.attribute(cudadrv.AttrComputeCapabilityMajor); err != nil {
		return 0, 0, err
	}
	minor, err = d.attribute(cudadrv.AttrComputeCapabilityMinor)
	return major, minor, err
}

func (d *Device) attribute(a cudadrv.Attribute) (int, error) {
	v, err := gpu.DeviceOf(d).Attribute(a)
	return int(v), err
}

// StartProfiler starts collection in the profiler that the process runs under, such as Nsight Systems
// with --capture-range=cudaProfilerApi; it mirrors
// torch.cuda.profiler.start. Without a profiler, or if the profiler collects already, it
// does nothing. It creates the device's context, enqueues nothing, and returns at once. To
// exclude operations that are already enqueued, call Sync first.
func (d *Device) StartProfiler() error {
	return gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStart() })
}

// StopProfiler ends the collection that StartProfiler began; it mirrors
// torch.cuda.profiler.stop. Call Sync first, or operations that are still running are not
// collected.
func (d *Device) StopProfiler() error {
	return gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.ProfilerStop() })
}

// CanAccessPeer reports whether kernels on d can read and write peer's memory;
// torch.cuda.can_device_access_peer.
func (d *Device) CanAccessPeer(peer *Device) (bool, error) {
	if err := d.sameSystem("ask for peer access", peer); err != nil {
		return false, err
	}
	return gpu.DeviceOf(d).CanAccessPeer(gpu.DeviceOf(peer))
}

// PeerRank returns the driver's ranking of the link between two devices: 0 is
// the fastest kind on the machine.
func (d *Device) PeerRank(peer *Device) (int, error) {
	v, err := d.link("rank the link", peer, cudadrv.P2PPerformanceRank)
	return int(v), err
}

// PeerAtomics reports whether the link between two devices carries atomic operations
// (cudaDevP2PAttrNativeAtomicSupported): NVLink does, and PCIe does not.
func (d *Device) PeerAtomics(peer *Device) (bool, error) {
	v, err := d.link("ask for atomics of peers", peer, cudadrv.P2PNativeAtomics)
	return v != 0, err
}

// PeerWorks reports whether a copy between the devices over peer access
// transfers the data correctly: on some machines the driver supports peer
// access but an IOMMU corrupts it, so that zeros arrive. The first call for two
// devices enables the access, copies a pattern in both directions and compares
// it. That takes some milliseconds and waits for these copies only; the result
// is cached, and a corrupted copy is logged once through log/slog. PeerWorks
// also returns false if the devices cannot access each other. CHORUS_P2P set to
// off or force decides without a test. PeerWorks must not be called by a
// goroutine that captures a graph.
func (d *Device) PeerWorks(peer *Device) (bool, error) {
	if err := d.sameSystem("test the peer", peer); err != nil {
		return false, err
	}
	works, err := gpu.DeviceOf(d).PeerWorks(gpu.DeviceOf(peer))
	if err != nil {
		return false, fmt.Errorf("device: test copies between %s and %s: %w", d, peer, err)
	}
	return works, nil
}

// link queries an attribute of the link between two devices.
func (d *Device) link(op string, peer *Device, a cudadrv.P2PAttribute) (int32, error) {
	if err := d.sameSystem(op, peer); err != nil {
		return 0, err
	}
	return ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (int32, cudadrv.Result) {
		return drv.DeviceGetP2PAttribute(a, h, gpu.DeviceOf(peer).Handle())
	})
}

func (d *Device) sameSystem(op string, o *Device) error {
	if o == nil {
		return fmt.Errorf("device: %s: no device given", op)
	}
	if d.sys != o.sys {
		return fmt.Errorf("device: %s: %s and %s belong to two systems", op, d, o)
	}
	return nil
}

// The methods below query NVIDIA's management library. They create no context, do not wait
// for work, may be called at any time, and work after a sticky error. If the machine has no
// libnvidia-ml, or the device lacks the sensor, their error matches errors.ErrUnsupported and
// says which. A virtual device reports its
// memory and its process, and has no sensors.

// Utilization returns the percentage of time that kernels ran during the last sample period
// (torch.cuda.utilization). The period is between a sixth of a second and a second.
func (d *Device) Utilization() (percent int, err error) {
	err = d.sense("utilization", func(n nvml.Device) (err error) { percent, _, err = n.Utilization(); return err })
	return percent, err
}

// MemoryActivity returns the percentage of time that device memory was read or written during
// the last sample period (torch.cuda.memory_usage).
func (d *Device) MemoryActivity() (percent int, err error) {
	err = d.sense("memory activity", func(n nvml.Device) (err error) { _, percent, err = n.Utilization(); return err })
	return percent, err
}

// Temperature returns the temperature of the chip in degrees Celsius;
// torch.cuda.temperature.
func (d *Device) Temperature() (celsius int, err error) {
	err = d.sense("temperature", func(n nvml.Device) (err error) { celsius, err = n.Temperature(); return err })
	return celsius, err
}

// PowerDraw returns the power consumption of the board in milliwatts;
// torch.cuda.power_draw.
func (d *Device) PowerDraw() (milliwatts int, err error) {
	err = d.sense("power draw", func(n nvml.Device) (err error) { milliwatts, err = n.Power(); return err })
	return milliwatts, err
}

// ClockRate returns the current clock of the multiprocessors in MHz;
// torch.cuda.clock_rate.
func (d *Device) ClockRate() (mhz int, err error) {
	err = d.sense("clock rate", func(n nvml.Device) (err error) { mhz, err = n.SMClock(); return err })
	return mhz, err
}

// MemoryUsed returns how many bytes of the device's memory are in use, by all processes
// and the driver itself; torch.cuda.device_memory_used.
func (d *Device) MemoryUsed() (bytes uint64, err error) {
	err = d.sense("memory used", func(n nvml.Device) (err error) { bytes, err = n.MemoryUsed(); return err })
	return bytes, err
}

// A Process is a process with a context on a device.
type Process struct {
	PID         int    `json:"pid"`          // in the kernel driver's namespace, not in a container's
	MemoryBytes uint64 `json:"memory_bytes"` // of the device; 0 if the driver does not report it
}

// Processes returns the processes that have a context on the device, by PID;
// torch.cuda.list_gpu_processes.
func (d *Device) Processes() ([]Process, error) {
	var list []Process
	err := d.sense("processes", func(n nvml.Device) error {
		found, err := n.Processes()
		for _, p := range found {
			list = append(list, Process{PID: p.PID, MemoryBytes: p.Bytes})
		}
		return err
	})
	slices.SortFunc(list, func(a, b Process) int { return cmp.Compare(a.PID, b.PID) })
	return list, err
}

// NVLinks reports for each NVLink of the device whether it is up.
func (d *Device) NVLinks() (up []bool, err error) {
	err = d.sense("NVLink state", func(n nvml.Device) (err error) { up, err = n.NVLinks(); return err })
	return up, err
}

// sense finds the device by its UUID, because CUDA and NVML may use different ordinals,
// and reads a value.
func (d *Device) sense(what string, read func(nvml.Device) error) error {
	api, err := gpu.SystemOf(d.sys).NVML()
	if err == nil {
		var uuid string
		if uuid, err = gpu.DeviceOf(d).UUID(); err != nil {
			return err
		}
		var n nvml.Device
		if n, err = api.Device(uuid); err == nil {
			err = read(n)
		}
	}
	if err == nil {
		return nil
	}
	if u, ok := errors.AsType[*nvml.UnsupportedError](err); ok {
		return &UnsupportedError{Feature: fmt.Sprintf("the %s of %s", what, d), Need: u.Need, Have: u.Have}
	}
	return fmt.Errorf("device: %s of %s: %w", what, d, err)
}
