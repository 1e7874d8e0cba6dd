package kernel

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// Attributes are the properties of a compiled kernel (cuFuncGetAttribute). On virtual
// devices they are those that the source declares: __launch_bounds__, static shared memory and very
// large local arrays. If NVRTC is installed, they are those of the source compiled for an H200.
type Attributes struct {
	MaxThreads            int // of a block
	Registers             int // of a thread
	SharedBytes           int // static, of a block
	LocalBytes            int // of a thread: arrays, and spilled registers
	ConstBytes            int // of the module
	MaxDynamicSharedBytes int // of a block: the maximum of Grid's shared bytes
}

// Attributes returns the properties of the compiled kernel. It does not call the driver.
func (k *Kernel) Attributes() Attributes { return k.attrs }

// limits are the limits of a device for launches.
type limits struct {
	multiprocessors int
	usualShared     int // maximum bytes of a block without permission for more
	mostShared      int
	cooperative     bool
}

func limitsOf(dev *device.Device) (l limits, err error) {
	cooperative := 0
	for _, a := range []struct {
		to   *int
		attr cudadrv.Attribute
	}{
		{&l.multiprocessors, cudadrv.AttrMultiprocessorCount},
		{&l.usualShared, cudadrv.AttrMaxSharedMemoryPerBlock},
		{&l.mostShared, cudadrv.AttrMaxSharedMemoryOptin},
		{&cooperative, cudadrv.AttrCooperativeLaunch},
	} {
		v, err := gpu.DeviceOf(dev).Attribute(a.attr)
		if err != nil {
			return l, err
		}
		*a.to = int(v)
	}
	l.cooperative = cooperative != 0
	return l, nil
}

// load queries the attributes of the kernel.
func (k *Kernel) load() error {
	for _, a := range []struct {
		to   *int
		attr cudadrv.FuncAttribute
	}{
		{&k.attrs.MaxThreads, cudadrv.FuncMaxThreadsPerBlock},
		{&k.attrs.Registers, cudadrv.FuncRegisters},
		{&k.attrs.SharedBytes, cudadrv.FuncSharedBytes},
		{&k.attrs.LocalBytes, cudadrv.FuncLocalBytes},
		{&k.attrs.ConstBytes, cudadrv.FuncConstBytes},
	} {
		err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
			v, r := drv.FuncGetAttribute(a.attr, k.h)
			*a.to = int(v)
			return r
		})
		if err != nil {
			return err
		}
	}
	l := &k.module.limits
	k.attrs.MaxDynamicSharedBytes = max(l.mostShared, l.usualShared) - k.attrs.SharedBytes
	k.shared.Store(uint32(max(0, l.usualShared-k.attrs.SharedBytes)))
	return nil
}

// Occupancy returns how many blocks with the given numbers of threads and bytes of dynamic
// shared memory are on a multiprocessor at once
// (cuOccupancyMaxActiveBlocksPerMultiprocessor).
func (k *Kernel) Occupancy(threads, sharedBytes int) (blocks int, err error) {
	if err := k.askable("occupancy", sharedBytes); err != nil {
		return 0, err
	}
	if threads < 1 || threads > k.attrs.MaxThreads {
		return 0, fmt.Errorf("kernel: occupancy of %s: %d threads of a block: want 1 to %d", k.name, threads, k.attrs.MaxThreads)
	}
	err = gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		n, r := drv.OccupancyMaxActiveBlocksPerMultiprocessor(k.h, int32(threads), uintptr(sharedBytes))
		blocks = int(n)
		return r
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: occupancy of %s: %w", k.name, err)
	}
	return blocks, nil
}

// BestBlock returns the number of threads per block that maximizes the number of resident
// threads, and the number of such blocks that fill the device
// (cuOccupancyMaxPotentialBlockSize). limit is the maximum number of threads; 0 means
// no limit.
func (k *Kernel) BestBlock(sharedBytes, limit int) (threads, blocks int, err error) {
	if err := k.askable("best block", sharedBytes); err != nil {
		return 0, 0, err
	}
	if limit < 0 {
		return 0, 0, fmt.Errorf("kernel: best block of %s: a limit of %d threads: want 1 or more, or 0 for none", k.name, limit)
	}
	err = gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		g, b, r := drv.OccupancyMaxPotentialBlockSize(k.h, uintptr(sharedBytes), int32(min(limit, int(maxThreads[0]))))
		threads, blocks = int(b), int(g)
		return r
	})
	if err != nil {
		return 0, 0, fmt.Errorf("kernel: best block of %s: %w", k.name, err)
	}
	return threads, blocks, nil
}

// askable validates the arguments of an occupancy query, and allows the kernel the shared
// memory in question, because CUDA answers for the currently allowed size.
func (k *Kernel) askable(what string, sharedBytes int) error {
	switch {
	case k.module.owner.Closed():
		return fmt.Errorf("kernel: %s of %s: module: %w", what, k.name, device.ErrClosed)
	case sharedBytes < 0 || sharedBytes > k.attrs.MaxDynamicSharedBytes:
		return fmt.Errorf("kernel: %s of %s: %d bytes of dynamic shared memory: want 0 to %d", what, k.name, sharedBytes, k.attrs.MaxDynamicSharedBytes)
	case uint32(sharedBytes) > k.shared.Load():
		if err := k.allowShared(uint32(sharedBytes)); err != nil {
			return fmt.Errorf("kernel: %s of %s: %w", what, k.name, err)
		}
	}
	return nil
}

// tooLarge returns the error of a cooperative grid that does not fit.
func (k *Kernel) tooLarge(g Grid, cause error) error {
	threads := int(g.Threads[0] * g.Threads[1] * g.Threads[2])
	each, err := k.Occupancy(threads, int(g.SharedBytes))
	if err != nil {
		return fmt.Errorf("kernel: launch %s together: %w", k.name, cause)
	}
	return fmt.Errorf("kernel: launch %s together: %d blocks of %d threads and %d bytes of dynamic shared memory: %d fit on %s, %d on each of %d multiprocessors: %w",
		k.name, uint64(g.Blocks[0])*uint64(g.Blocks[1])*uint64(g.Blocks[2]), threads, g.SharedBytes,
		each*k.module.limits.multiprocessors, k.module.dev, each, k.module.limits.multiprocessors, cause)
}
