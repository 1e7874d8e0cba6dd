package machine

import (
	"math"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// The limits of an H200.
const (
	maxThreadsPerBlock = 1024
	maxThreadsPerSM    = 2048
	maxBlocksPerSM     = 32
	maxSharedPerBlock  = 49152  // default limit; FuncSetAttribute can raise it
	maxSharedOptin     = 232448 // maximum for FuncSetAttribute
	maxSharedPerSM     = 233472
	reservedShared     = 1024 // for the system, in each block
	sharedUnit         = 128  // shared memory of a block is a multiple of it
	warpSize           = 32
	maxLocalBytes      = 512 << 10 // of a thread
	registersPerSM     = 65536
	registerUnit       = 256 // registers of a warp are a multiple of it
	warpsTogether      = 4   // that get registers: one of each scheduler
)

func (d driver) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, sharedBytes uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.launch("cuLaunchKernel", f, grid, block, sharedBytes, s, params, false)
}

func (d driver) LaunchCooperativeKernel(f cudadrv.Function, grid, block [3]uint32, sharedBytes uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.launch("cuLaunchCooperativeKernel", f, grid, block, sharedBytes, s, params, true)
}

func (d driver) launch(name string, fh cudadrv.Function, grid, block [3]uint32, sharedBytes uint32, h cudadrv.Stream, params unsafe.Pointer, together bool) cudadrv.Result {
	c, s, r := d.beginStream(name, h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	f := d.m.functions[fh]
	if f == nil || f.dev != c.dev || s.dev != c.dev {
		return cudadrv.ErrorInvalidHandle
	}
	if ParamBytes(f.kernel.Params) > MaxParamBytes || !validGrid(grid, block) || int64(sharedBytes) > int64(f.shared) || params == nil && len(f.kernel.Params) > 0 {
		return cudadrv.ErrorInvalidValue
	}
	threads := int(block[0] * block[1] * block[2])
	if threads > f.kernel.Limits.maxThreads() || f.kernel.Limits.LocalBytes > maxLocalBytes {
		return cudadrv.ErrorInvalidValue
	}
	blocks := uint64(grid[0]) * uint64(grid[1]) * uint64(grid[2])
	resident := uint64(f.residentBlocks(threads, uintptr(sharedBytes)))
	if together && blocks > uint64(d.m.cfg.SMs)*resident {
		if s.capture != nil {
			s.capture.invalid = true
		}
		return cudadrv.ErrorCooperativeLaunchTooLarge
	}
	k := &KernelCall{kernel: &f.kernel, grid: grid, block: block, shared: sharedBytes,
		full: together && blocks > uint64(d.m.cfg.SMs-1)*resident}
	k.params, k.structs = readParams(f.kernel.Params, params)
	c.name, c.cooperative = "kernel "+f.kernel.Name, together
	c.check = func() cudadrv.Result {
		if d.m.functions[fh] == nil {
			return cudadrv.ErrorInvalidHandle
		}
		return cudadrv.Success
	}
	c.enqueue(s, k.run)
	return cudadrv.Success
}

func validGrid(grid, block [3]uint32) bool {
	threads := uint64(1)
	for i := range 3 {
		if grid[i] == 0 || block[i] == 0 || block[i] > maxThreadsPerBlock {
			return false
		}
		threads *= uint64(block[i])
	}
	return threads <= maxThreadsPerBlock && block[2] <= 64 &&
		grid[0] <= math.MaxInt32 && grid[1] <= math.MaxUint16 && grid[2] <= math.MaxUint16
}

// readParams copies the values that the addresses in the array point to.
func readParams(types []Param, array unsafe.Pointer) (values []uint64, structs map[int][]byte) {
	values = make([]uint64, len(types))
	if len(types) == 0 {
		return values, nil
	}
	for i, p := range unsafe.Slice((*unsafe.Pointer)(array), len(types)) {
		if types[i]&0xff == structParam {
			if structs == nil {
				structs = map[int][]byte{}
			}
			structs[i] = slices.Clone(unsafe.Slice((*byte)(p), types[i].size()))
			continue
		}
		switch types[i].size() {
		case 1:
			values[i] = uint64(*(*uint8)(p))
		case 2:
			values[i] = uint64(*(*uint16)(p))
		case 4:
			values[i] = uint64(*(*uint32)(p))
		default:
			values[i] = *(*uint64)(p)
		}
	}
	return values, structs
}

// residentBlocks returns the number of blocks that fit on a multiprocessor.
func (f *function) residentBlocks(threads int, shared uintptr) int {
	warps := (threads + warpSize - 1) / warpSize
	shared = (shared + uintptr(f.kernel.Limits.SharedBytes) + reservedShared + sharedUnit - 1) / sharedUnit * sharedUnit
	blocks := min(maxBlocksPerSM, maxThreadsPerSM/(warps*warpSize), int(maxSharedPerSM/shared))
	if n := f.kernel.Limits.Registers; n > 0 {
		fit := registersPerSM / registersOfWarp(n) / warpsTogether * warpsTogether
		blocks = min(blocks, fit/warps)
	}
	return blocks
}

func (d driver) beginFunction(name string, fh cudadrv.Function) (call, *function, cudadrv.Result) {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	f := d.m.functions[fh]
	if f == nil || f.dev != c.dev {
		c.end()
		return c, nil, cudadrv.ErrorInvalidHandle
	}
	return c, f, cudadrv.Success
}

func (d driver) FuncGetAttribute(a cudadrv.FuncAttribute, fh cudadrv.Function) (int32, cudadrv.Result) {
	c, f, r := d.beginFunction("cuFuncGetAttribute", fh)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	switch a {
	case cudadrv.FuncMaxThreadsPerBlock:
		return int32(f.kernel.Limits.maxThreads()), cudadrv.Success
	case cudadrv.FuncMaxDynamicSharedBytes:
		return f.shared, cudadrv.Success
	case cudadrv.FuncSharedBytes:
		return int32(f.kernel.Limits.SharedBytes), cudadrv.Success
	case cudadrv.FuncConstBytes:
		return int32(f.kernel.Limits.ConstBytes), cudadrv.Success
	case cudadrv.FuncLocalBytes:
		return int32(f.kernel.Limits.LocalBytes), cudadrv.Success
	case cudadrv.FuncRegisters:
		return int32(f.kernel.Limits.Registers), cudadrv.Success
	}
	return 0, cudadrv.ErrorInvalidValue
}

func (d driver) FuncSetAttribute(fh cudadrv.Function, a cudadrv.FuncAttribute, value int32) cudadrv.Result {
	c, f, r := d.beginFunction("cuFuncSetAttribute", fh)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if a != cudadrv.FuncMaxDynamicSharedBytes || value < 0 || int(value)+f.kernel.Limits.SharedBytes > maxSharedOptin {
		return cudadrv.ErrorInvalidValue
	}
	f.shared = value
	return cudadrv.Success
}

func (d driver) OccupancyMaxActiveBlocksPerMultiprocessor(fh cudadrv.Function, blockSize int32, sharedBytes uintptr) (int32, cudadrv.Result) {
	c, f, r := d.beginFunction("cuOccupancyMaxActiveBlocksPerMultiprocessor", fh)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if blockSize < 1 {
		return 0, cudadrv.ErrorInvalidValue
	}
	if int(blockSize) > f.kernel.Limits.maxThreads() || sharedBytes > uintptr(f.shared) {
		return 0, cudadrv.Success // no block fits
	}
	return int32(f.residentBlocks(int(blockSize), sharedBytes)), cudadrv.Success
}

func (d driver) OccupancyMaxPotentialBlockSize(fh cudadrv.Function, sharedBytes uintptr, limit int32) (minGrid, block int32, r cudadrv.Result) {
	c, f, r := d.beginFunction("cuOccupancyMaxPotentialBlockSize", fh)
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	if limit < 0 || sharedBytes > uintptr(f.shared) {
		return 0, 0, cudadrv.ErrorInvalidValue
	}
	most := int32(f.kernel.Limits.maxThreads())
	if limit > 0 {
		most = min(most, limit)
	}
	best := 0
	for size := most; size > 0; size = (size - 1) / warpSize * warpSize {
		if threads := int(size) * f.residentBlocks(int(size), sharedBytes); threads > best {
			best, block = threads, size
		}
	}
	return int32(d.m.cfg.SMs * f.residentBlocks(int(block), sharedBytes)), block, cudadrv.Success
}

// Shared returns memory that kernels of several devices use at the same time,
// valid until Func returns and accessed with atomic operations only. Shared
// checks that the device may use the memory, but does not record the use,
// because the kernels synchronize through its content.
func (k *KernelCall) Shared(p cudadrv.DevicePtr, bytes uintptr) []byte {
	if bytes == 0 {
		return nil
	}
	m := k.op.s.dev.m
	m.mu.Lock()
	data, t := k.op.share(p, uint64(bytes))
	m.mu.Unlock()
	if t != nil {
		panic(t)
	}
	return data
}

// share is touch without a record of the use. Memory mapped in a reservation must
// still not be unmapped during the call. m.mu is held.
func (o *Op) share(p cudadrv.DevicePtr, n uint64) ([]byte, *Trouble) {
	b, t := o.resolve(p, n, true)
	if t != nil {
		return nil, t
	}
	offset := uint64(p) - b.addr
	if b.space != nil {
		for _, x := range b.space.within(offset, n) {
			x.use(o.access())
		}
	}
	return o.hold(b, offset, n), nil
}

// SharedOf is KernelCall.Shared for n elements at p, which must be aligned to
// their size.
func SharedOf[T uint32 | uint64](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	var zero T
	checkAligned[T](k, p)
	return View[T](k.Shared(p, uintptr(n)*unsafe.Sizeof(zero)))
}

// Await polls awaitYields times and then sleeps between polls, first for
// awaitFirst and at most for awaitLongest.
const (
	awaitYields  = 200
	awaitFirst   = 10 * time.Microsecond
	awaitLongest = time.Millisecond
)

// Await polls ready until it returns true, or returns false if the device is
// lost first.
func (k *KernelCall) Await(ready func() bool) bool {
	return k.op.await("memory that another kernel writes", ready)
}

// await is Await for any operation, which waits for what on says.
func (o *Op) await(on string, ready func() bool) bool {
	m, lost := o.s.dev.m, o.s.dev.lost
	block := func(on string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		o.Block(on)
	}
	pause := awaitFirst
	n := 0
	for ; !ready(); n++ {
		select {
		case <-lost:
			return false
		default:
		}
		if n < awaitYields {
			runtime.Gosched()
			continue
		}
		if n == awaitYields {
			block(on)
		}
		time.Sleep(pause)
		pause = min(2*pause, awaitLongest)
	}
	if n > awaitYields {
		block("")
	}
	return true
}
