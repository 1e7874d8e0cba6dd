package device

import "github.com/gochorus/chorus/internal/cudadrv"

// Properties are fixed facts of a device; torch.cuda.get_device_properties.
type Properties struct {
	Name                 string `json:"name"`
	UUID                 string `json:"uuid"`
	PCIBusID             string `json:"pci_bus_id"`
	Major                int    `json:"major"` // compute capability
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

// Properties asks the driver for all of them. No context is created.
func (d *Device) Properties() (*Properties, error) {
	p := new(Properties)
	var err error
	if p.Name, err = d.Name(); err != nil {
		return nil, err
	}
	if p.UUID, err = d.UUID(); err != nil {
		return nil, err
	}
	if p.PCIBusID, err = d.PCIBusID(); err != nil {
		return nil, err
	}
	total, r := d.sys.sys.Driver.DeviceTotalMem(d.handle)
	if err := d.Check("cuDeviceTotalMem", r); err != nil {
		return nil, err
	}
	p.TotalMemory = uint64(total)
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
			return nil, err
		}
	}
	p.MemoryPoolsSupported = pools != 0
	return p, nil
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
	v, r := d.sys.sys.Driver.DeviceGetAttribute(a, d.handle)
	return int(v), d.Check("cuDeviceGetAttribute", r)
}
