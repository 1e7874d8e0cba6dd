package sanitizer

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
)

func read(p cudadrv.DevicePtr, n uintptr) cudadrv.Use {
	return cudadrv.Use{Ptr: p, Bytes: uint64(n)}
}

func write(p cudadrv.DevicePtr, n uintptr) cudadrv.Use {
	return cudadrv.Use{Ptr: p, Bytes: uint64(n), Write: true}
}

func onHost(p unsafe.Pointer) cudadrv.DevicePtr { return cudadrv.DevicePtr(uintptr(p)) }

func (d driver) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, n uintptr, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.enqueued(d.Driver.MemcpyHtoDAsync(dst, src, n, s), "cuMemcpyHtoDAsync", ctx, s, read(onHost(src), n), write(dst, n))
}

// MemcpyDtoHAsync to memory that is not page-locked returns after the copy.
func (d driver) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	d.t.mu.Lock()
	at := d.t.queue(ctx, s).now
	pinned := d.t.blocks.find(uint64(onHost(dst))) != nil
	d.t.mu.Unlock()
	r := d.enqueued(d.Driver.MemcpyDtoHAsync(dst, src, n, s), "cuMemcpyDtoHAsync", ctx, s, read(src, n), write(onHost(dst), n))
	if r == cudadrv.Success && !pinned {
		at.Epoch++ // the copy
		d.t.waited(Clock(nil).JoinStamp(at))
	}
	return r
}

func (d driver) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.enqueued(d.Driver.MemcpyDtoDAsync(dst, src, n, s), "cuMemcpyDtoDAsync", ctx, s, read(src, n), write(dst, n))
}

func (d driver) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, n uintptr, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.enqueued(d.Driver.MemcpyPeerAsync(dst, dstCtx, src, srcCtx, n, s), "cuMemcpyPeerAsync", ctx, s, read(src, n), write(dst, n))
}

// maxRows is the number of rows that are recorded one by one. The rows of a copy with more
// rows are not recorded, because bytes between them may belong to others.
const maxRows = 1 << 14

func (d driver) Memcpy2DAsync(c cudadrv.Memcpy2D, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	var uses []cudadrv.Use
	if c.Height <= maxRows {
		for row := range c.Height {
			uses = append(uses, read(c.Src+cudadrv.DevicePtr(row*c.SrcPitch), c.WidthInBytes), write(c.Dst+cudadrv.DevicePtr(row*c.DstPitch), c.WidthInBytes))
		}
	}
	return d.enqueued(d.Driver.Memcpy2DAsync(c, s), "cuMemcpy2DAsync", ctx, s, uses...)
}

func (d driver) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, n uintptr, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.enqueued(d.Driver.MemsetD8Async(dst, value, n, s), "cuMemsetD8Async", ctx, s, write(dst, n))
}

func (d driver) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.launched(d.Driver.LaunchKernel(f, grid, block, shared, s, params), ctx, f, s, params)
}

func (d driver) LaunchCooperativeKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.launched(d.Driver.LaunchCooperativeKernel(f, grid, block, shared, s, params), ctx, f, s, params)
}

func (d driver) launched(r cudadrv.Result, ctx cudadrv.Context, f cudadrv.Function, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	d.t.mu.Lock()
	k, known := d.t.kernels[f]
	d.t.mu.Unlock()
	if r != cudadrv.Success || !known {
		return r
	}
	return d.enqueued(r, "kernel "+k.name, ctx, s, k.uses(params)...)
}

func (d driver) Describe(f cudadrv.Function, name string, uses func(params unsafe.Pointer) []cudadrv.Use) {
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	d.t.kernels[f] = description{name, uses}
}

func (d driver) Used(o cudadrv.Operation) {
	if o.Meets {
		d.t.mu.Lock()
		d.t.meets[o.Context] = true
		d.t.mu.Unlock()
	}
	d.t.enqueue(o.Context, o.Stream, o.Name, Here(), o.Uses...)
}

// cufile is a decorated cuFile. The host must have waited for earlier uses of the memory of a
// synchronous transfer.
type cufile struct {
	cufileapi.API
	t *tracker
}

// onHost records an operation of the host, which ends when call returns.
func (f cufile) onHost(name string, use cudadrv.Use, call func()) {
	where := Here()
	f.t.mu.Lock()
	q := &queue{handle: Host, now: f.t.slots.Take()}
	delete(f.t.contexts, q.now.Slot)
	f.t.perform(&node{name: name, where: where, uses: []cudadrv.Use{use}}, []*queue{q})
	f.t.unlock()
	call()
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	f.t.host = f.t.host.JoinStamp(q.now)
	f.t.slots.Put(q.now)
}

func (f cufile) Read(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	f.onHost("cuFileRead", write(base+cudadrv.DevicePtr(devOffset), bytes), func() { n, err = f.API.Read(h, base, bytes, fileOffset, devOffset) })
	return n, err
}

func (f cufile) Write(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	f.onHost("cuFileWrite", read(base+cudadrv.DevicePtr(devOffset), bytes), func() { n, err = f.API.Write(h, base, bytes, fileOffset, devOffset) })
	return n, err
}
