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

// A farRank is one rank of a communicator whose other ranks are in other processes.
// All ranks call testAll with the same seed and sizes. Each rank generates the inputs
// of all ranks and checks all received data against them.
type farRank struct {
	Driver  cudadrv.Driver
	API     ncclapi.API
	Context cudadrv.Context
	Stream  cudadrv.Stream
	Comm    ncclapi.Comm
	Me, N   int

	Seed uint64
	// Counts are numbers of elements of a part. The other sizes are in bytes of the
	// operation's longer buffer, or 0. Medium is for all types and reductions. Large is for
	// some of them: each type and each reduction occurs. Huge is for one type, in an
	// all-reduce and, with up to 4 ranks, in other operations that move much.
	Counts              []int
	Medium, Large, Huge int

	src        source
	ref        reference
	send, recv cudadrv.DevicePtr
	cases      int
	wrong      []error
}

// mostWrong limits the number of reported errors.
const mostWrong = 5

// broken is a failed call, which ends testAll.
type broken struct{ error }

// testAll tests every operation. It continues after a wrong result, because the other
// ranks wait for this one.
func (r *farRank) testAll() (err error) {
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

// sizes runs one operation in all sizes. Operations without a reduction run once
// for each type.
func (r *farRank) sizes(o *operation, t ncclapi.DType, op ncclapi.RedOp, large bool) {
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

// run runs one case: it poisons the output, issues the operation and checks every
// element.
func (r *farRank) run(o *operation, t ncclapi.DType, op ncclapi.RedOp, count int) {
	r.cases++
	c := &issued{farRank: r, t: t, op: op, count: count, root: r.cases % r.N, bytes: count * int(t.Size())}
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

// The units of copying and checking, chosen to fit in a core's cache.
const (
	copyBytes  = 512 << 10
	checkBytes = 8 << 10
)

// checkPiece checks the output from byte lo on, in pieces from a single rank.
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

// An issued is a running case.
type issued struct {
	*farRank
	t     ncclapi.DType
	op    ncclapi.RedOp
	count int
	bytes int // size of count elements
	root  int
}

// reduced compares a piece of a result with the reduction of the inputs, starting
// at byte from.
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

// moved compares a piece of a result with a rank's input, starting at byte from.
func (c *issued) moved(rank, from int, got []byte) string {
	if bytes.Equal(c.src.part(rank, from, from+len(got)), got) {
		return ""
	}
	return fmt.Sprintf("some of the %d bytes from rank %d are wrong, starting at byte %d of its input", len(got), rank, from)
}

func (r *farRank) nccl(res ncclapi.Result) {
	if res != ncclapi.Success {
		panic(broken{fmt.Errorf("rank %d of %d, case %d: %w: %s", r.Me, r.N, r.cases, res, r.API.GetLastError(r.Comm))})
	}
}

// cu calls the driver with the context bound.
func (r *farRank) cu(f func() cudadrv.Result) {
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

func (r *farRank) alloc(n int) (p cudadrv.DevicePtr) {
	r.cu(func() (res cudadrv.Result) { p, res = r.Driver.MemAlloc(uintptr(n)); return res })
	return p
}

func (r *farRank) free(p cudadrv.DevicePtr) {
	r.cu(func() cudadrv.Result { return r.Driver.MemFree(p) })
}

func (r *farRank) upload(p cudadrv.DevicePtr, v []byte) {
	r.cu(func() cudadrv.Result {
		return r.Driver.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v)), r.Stream)
	})
}

// download copies to pageable memory, so the copy is complete when the call
// returns.
func (r *farRank) download(p cudadrv.DevicePtr, n int) []byte {
	v := make([]byte, n)
	r.cu(func() cudadrv.Result {
		return r.Driver.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n), r.Stream)
	})
	return v
}
