package device

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

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

// Properties queries the driver for all properties. No context is created.
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
