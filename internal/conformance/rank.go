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
	// Counts are numbers of elements for each of a rank's parts. The others are
	// in bytes of an operation's longer buffer, or 0: Medium is for all types and
	// reductions, Large for some of them, so that each type and each reduction has a turn, Huge
	// for one type, in an all-reduce and up to 4 ranks in what else moves much.
	Counts              []int
	Medium, Large, Huge int

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
	room := max(r.Medium, r.Large, r.Huge, 8*r.N*max(1, maxOf(r.Counts))) + guardBytes
	r.send, r.recv = r.alloc(room), r.alloc(room)
	for i, t := range dtypes {
		for k, op := range redops {
			for j := range operations {
				r.sizes(&operations[j], t, op, (i+j+k)%len(redops) == 0)
			}
		}
	}
	for i := range operations {
		if o := &operations[i]; r.Huge > 0 && (i == 0 || o.huge && r.N <= 4) {
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
func (r *Rank) sizes(o *operation, t ncclapi.DType, op ncclapi.RedOp, large bool) {
	if !o.reduces && op != ncclapi.Sum || !r.API.Has(o.f) {
		return
	}
	for _, count := range r.Counts {
		r.run(o, t, op, count)
	}
	unit := int(t.Size()) * o.longest(r.N)
	if r.Medium > 0 {
		r.run(o, t, op, r.Medium/unit)
	}
	if r.Large > 0 && large {
		r.run(o, t, op, r.Large/unit)
	}
}

// run carries out one case: it poisons the output, issues the operation and
// looks at every element.
func (r *Rank) run(o *operation, t ncclapi.DType, op ncclapi.RedOp, count int) {
	r.cases++
	c := &issued{Rank: r, t: t, op: op, count: count, root: r.cases % r.N, bytes: count * int(t.Size())}
	r.src = source{seed: r.Seed + uint64(r.cases), t: t, space: r.src.space}
	if o.reduces {
		r.src.draw = drawOf(t, op)
	}
	in, out := c.bytes*o.sends(r.N), c.bytes*o.receives(r.N)
	for lo := 0; lo < in; lo += copyBytes {
		r.upload(r.send+cudadrv.DevicePtr(lo), r.src.part(r.Me, lo, min(lo+copyBytes, in)))
	}
	r.cu(func() cudadrv.Result {
		return r.Driver.MemsetD8Async(r.recv, poisonByte, uintptr(out+guardBytes), r.Stream)
	})
	o.issue(c)
	if o.rooted && o.receivesAtRoot && r.Me != c.root {
		out = 0
	}
	bad := ""
	for lo := 0; lo < out && bad == ""; lo += copyBytes {
		bad = c.checkPiece(o, lo, r.download(r.recv+cudadrv.DevicePtr(lo), min(copyBytes, out-lo)))
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

// How much is copied and how much is checked at a time, which is what stays in
// a core's cache.
const (
	copyBytes  = 512 << 10
	checkBytes = 8 << 10
)

// checkPiece checks the output from byte lo on, in parts that lie within what
// one rank has sent.
func (c *issued) checkPiece(o *operation, lo int, got []byte) string {
	for len(got) > 0 {
		n := min(len(got), checkBytes-lo%checkBytes, c.bytes-lo%c.bytes)
		if bad := o.check(c, lo, got[:n]); bad != "" {
			return bad
		}
		lo, got = lo+n, got[n:]
	}
	return ""
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
