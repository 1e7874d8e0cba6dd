package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A Rank is one rank of a communicator whose others are in other processes.
// All of them call Run with the same seed and sizes; each draws the inputs of
// all ranks by itself and checks all that it has received against them.
type Rank struct {
	Driver  cudadrv.Driver
	API     ncclapi.API
	Context cudadrv.Context
	Stream  cudadrv.Stream
	Comm    ncclapi.Comm
	Me, N   int

	Seed uint64
	// Counts are numbers of elements for each of a rank's parts, for all types
	// and reductions. In place of 0, Large is in bytes and for all types and
	// reductions too, Huge for one type and reduction and for the operations
	// that move much; each is the size of an operation's longer buffer.
	Counts      []int
	Large, Huge int

	src        source
	ref        reference
	send, recv cudadrv.DevicePtr
	cases      int
	wrong      []error
}

// mostWrong is how many wrong results are told of.
const mostWrong = 5

// broken is a call that failed, which ends Run.
type broken struct{ error }

// Run tests every operation. A wrong result does not end it, for the other
// ranks count on this one.
func (r *Rank) Run() (err error) {
	defer func() {
		switch x := recover().(type) {
		case nil:
			err = errors.Join(r.wrong...)
		case broken:
			err = errors.Join(append(r.wrong, x.error)...)
		default:
			panic(x)
		}
	}()
	room := max(r.Large, r.Huge, 8*r.N*max(1, maxOf(r.Counts))) + guardBytes
	r.send, r.recv = r.alloc(room), r.alloc(room)
	for _, t := range dtypes {
		for _, op := range redops {
			for i := range operations {
				r.sizes(&operations[i], t, op)
			}
		}
	}
	for i := range operations {
		if o := &operations[i]; r.Huge > 0 && o.huge {
			r.run(o, ncclapi.Float32, ncclapi.Sum, r.Huge/4/o.longest(r.N))
		}
	}
	r.free(r.send)
	r.free(r.recv)
	return nil
}

func maxOf(list []int) (most int) {
	for _, n := range list {
		most = max(most, n)
	}
	return most
}

// sizes runs one operation in all sizes. What reduces nothing runs once for a
// type.
func (r *Rank) sizes(o *operation, t ncclapi.DType, op ncclapi.RedOp) {
	if !o.reduces && op != ncclapi.Sum || !r.API.Has(o.f) {
		return
	}
	for _, count := range r.Counts {
		r.run(o, t, op, count)
	}
	if r.Large > 0 {
		r.run(o, t, op, r.Large/int(t.Size())/o.longest(r.N))
	}
}

// run carries out one case: it poisons the output, issues the operation and
// looks at every element.
func (r *Rank) run(o *operation, t ncclapi.DType, op ncclapi.RedOp, count int) {
	r.cases++
	c := &issued{Rank: r, t: t, op: op, count: count, root: r.cases % r.N, bytes: count * int(t.Size())}
	r.src = source{seed: r.Seed + uint64(r.cases), t: t, block: r.src.block}
	if o.reduces {
		r.src.draw = drawOf(t, op)
	}
	in, out := c.bytes*o.sends(r.N), c.bytes*o.receives(r.N)
	for lo := 0; lo < in; lo += inputBlock {
		r.upload(r.send+cudadrv.DevicePtr(lo), r.src.part(r.Me, lo, min(lo+inputBlock, in)))
	}
	r.cu(func() cudadrv.Result {
		return r.Driver.MemsetD8Async(r.recv, poisonByte, uintptr(out+guardBytes), r.Stream)
	})
	o.issue(c)
	if o.rooted && o.receivesAtRoot && r.Me != c.root {
		out = 0
	}
	bad := ""
	for lo := 0; lo < out && bad == ""; {
		// A piece lies within what one rank has sent.
		hi := min(lo+inputBlock, out, (lo/max(c.bytes, 1)+1)*c.bytes)
		bad = o.check(c, lo, r.download(r.recv+cudadrv.DevicePtr(lo), hi-lo))
		lo = hi
	}
	if bad == "" {
		for _, b := range r.download(r.recv+cudadrv.DevicePtr(out), guardBytes) {
			if b != poisonByte {
				bad = "bytes behind the output were written"
			}
		}
	}
	if bad != "" && len(r.wrong) < mostWrong {
		r.wrong = append(r.wrong, fmt.Errorf("rank %d of %d, case %d: %s of %d x %s, %s, root %d (seed %#x): %s",
			r.Me, r.N, r.cases, strings.TrimPrefix(o.f.Name(), "nccl"), count, dtypeNames[t], redopNames[op], c.root, r.Seed, bad))
	}
}

// An issued is a case that runs.
type issued struct {
	*Rank
	t     ncclapi.DType
	op    ncclapi.RedOp
	count int
	bytes int // of count elements
	root  int
}

// reduced compares a piece of a result with the reduction of the inputs'
// bytes from a place on.
func (c *issued) reduced(from int, got []byte) string {
	size := int(c.t.Size())
	c.ref.begin(c.t, c.op, len(got)/size)
	for rank := range c.N {
		c.ref.add(c.src.part(rank, from, from+len(got)))
	}
	bad, at := c.ref.check(got, from/size)
	if bad != "" {
		bad = fmt.Sprintf("element %d: %s", from/size+at, bad)
	}
	return bad
}

// moved compares a piece of a result with a rank's input from a byte on.
func (c *issued) moved(rank, from int, got []byte) string {
	if bytes.Equal(c.src.part(rank, from, from+len(got)), got) {
		return ""
	}
	return fmt.Sprintf("of the %d bytes that rank %d has sent from byte %d on, some are wrong", len(got), rank, from)
}

func (r *Rank) nccl(res ncclapi.Result) {
	if res != ncclapi.Success {
		panic(broken{fmt.Errorf("rank %d of %d, case %d: %w: %s", r.Me, r.N, r.cases, res, r.API.GetLastError(r.Comm))})
	}
}

// cu makes a driver call with the context bound.
func (r *Rank) cu(f func() cudadrv.Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	res := r.Driver.CtxSetCurrent(r.Context)
	if res == cudadrv.Success {
		res = f()
	}
	if res != cudadrv.Success {
		panic(broken{fmt.Errorf("rank %d of %d, case %d: %w; NCCL: %s", r.Me, r.N, r.cases, res, r.API.GetLastError(r.Comm))})
	}
}

func (r *Rank) alloc(n int) (p cudadrv.DevicePtr) {
	r.cu(func() (res cudadrv.Result) { p, res = r.Driver.MemAlloc(uintptr(n)); return res })
	return p
}

func (r *Rank) free(p cudadrv.DevicePtr) {
	r.cu(func() cudadrv.Result { return r.Driver.MemFree(p) })
}

func (r *Rank) upload(p cudadrv.DevicePtr, v []byte) {
	r.cu(func() cudadrv.Result {
		return r.Driver.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v)), r.Stream)
	})
}

// download copies to memory that is not page-locked, and so has the bytes when
// it returns.
func (r *Rank) download(p cudadrv.DevicePtr, n int) []byte {
	v := make([]byte, n)
	r.cu(func() cudadrv.Result {
		return r.Driver.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n), r.Stream)
	})
	return v
}
