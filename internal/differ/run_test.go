package differ

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A bench is a device with the expensive objects that programs share.
type bench struct {
	sys     *device.System
	dev     *device.Device
	module  *kernel.Module
	kernels map[string]*kernel.Kernel
	mask    *kernel.Elementwise
	comm    *nccl.Communicator
	s       *stream.Stream // of the bench
	idle    []idleStream   // that programs have left open
	closed  int            // streams that programs have closed since the cache was emptied
	host    *memory.Pinned[byte]
}

// An idleStream is one that the next program may have: new ones would each need
// segments of their own from the allocator.
type idleStream struct {
	s        *stream.Stream
	priority int
}

// newStream returns an idle stream or a new one.
func (b *bench) newStream(priority int) (*stream.Stream, error) {
	for i, x := range b.idle {
		if x.priority == priority {
			b.idle = append(b.idle[:i], b.idle[i+1:]...)
			return x.s, nil
		}
	}
	return stream.New(b.dev, &stream.Config{Priority: priority})
}

// A result is the result of one operation.
type result struct {
	Kind string `json:"kind,omitempty"` // of the error
	Err  string `json:"err,omitempty"`  // its text, which is not compared
	Out  []byte `json:"out,omitempty"`  // what was read from memory
	Text string `json:"text,omitempty"` // what else was returned
}

// An outcome has the results of a program.
type outcome struct {
	Results []result
	Calls   [maxCallbacks]int64
	Memory  map[int][]byte // of the objects that were open at the end
	Close   []result       // of what was open at the end
	Stats   string         // the difference that the program has made in the end
	Sticky  string         // the device's state at the end
	Reports []string       // of virtual devices
}

// A runner executes one program.
type runner struct {
	b       *bench
	ctx     context.Context
	objs    map[int]any
	order   []int // of objects, as they were made
	out     *outcome
	calls   [maxCallbacks]atomic.Int64
	threads [2]chan func()
	inner   bool        // on the second thread
	batch   *nccl.Batch // of the group that is open
	base    memory.Stats
}

// run executes a program on a bench.
func run(b *bench, p *Program) *outcome {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := &runner{b: b, ctx: ctx, objs: map[int]any{}, out: &outcome{Memory: map[int][]byte{}}}
	r.out.Results = make([]result, p.number())
	for i := range r.out.Results {
		r.out.Results[i].Kind = kSkipped
	}
	for i := range r.threads {
		r.threads[i] = make(chan func())
		go func() {
			runtime.LockOSThread() // ends with the goroutine
			for fn := range r.threads[i] {
				fn()
			}
		}()
		defer close(r.threads[i])
	}
	r.on(0, func() {
		if !p.Fatal {
			r.base = r.begin()
		}
		r.do(p.Ops)
		r.end(p.Fatal)
	})
	return r.out
}

// on calls fn on one of the runner's threads and waits for it.
func (r *runner) on(thread int, fn func()) {
	done := make(chan struct{})
	r.threads[thread] <- func() { defer close(done); fn() }
	<-done
}

func (r *runner) begin() memory.Stats {
	st, _ := memory.StatsOf(r.b.dev)
	return st
}

func (r *runner) do(ops []Op) {
	for i := range ops {
		op := &ops[i]
		if op.T == 0 || r.inner {
			r.one(op)
			continue
		}
		r.inner = true
		r.on(1, func() { r.one(op) })
		r.inner = false
	}
}

func (r *runner) one(op *Op) {
	res := result{}
	err := try(func() error { return kinds[op.K].run(r, op, &res) })
	res.Kind = kindOf(err)
	if err != nil {
		res.Err = err.Error()
	}
	r.out.Results[op.at] = res
}

func try(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = panicked{v}
		}
	}()
	return fn()
}

// body returns the function that an operation gives to Chorus.
func (r *runner) body(op *Op) func() error {
	return func() error {
		r.do(op.Do)
		if op.Fail {
			return errBody
		}
		return nil
	}
}

// put keeps an object under the number that the operation gives it.
func (r *runner) put(op *Op, o any, err error) error {
	if err == nil {
		r.objs[op.R] = o
		r.order = append(r.order, op.R)
	}
	return err
}

// get returns an object. The error says that it was never made.
func get[T any](r *runner, n int) (T, error) {
	o, ok := r.objs[n].(T)
	if !ok {
		return o, errAbsent
	}
	return o, nil
}

// A buf is device memory of a program.
type buf struct {
	elem   int // bytes
	bytes  memory.Slice[byte]
	close  func() error
	buffer *memory.Buffer
}

// part returns the bytes that a Ref names. It panics where the bounds are wrong,
// as Slice does.
func (r *runner) part(x Ref) (memory.Slice[byte], error) {
	b, err := get[*buf](r, x.O)
	if err != nil {
		return memory.Slice[byte]{}, err
	}
	return b.bytes.Slice(x.Lo, x.Hi), nil
}

// typed returns the elements that a Ref names.
func typed[T memory.Element](r *runner, x Ref) (memory.Slice[T], error) {
	b, err := get[*buf](r, x.O)
	if err != nil {
		return memory.Slice[T]{}, err
	}
	return memory.View[T](b.buffer, x.Lo, x.len()/memory.DTypeOf[T]().Size())
}

// end waits for the device, reads all memory that is open, and closes everything.
func (r *runner) end(fatal bool) {
	b := r.b
	for thread := range 2 { // the one that began it must end it
		r.abort(thread)
	}
	err := b.dev.Sync(r.ctx)
	r.out.Sticky = kindOf(err)
	if err == nil && !fatal {
		r.readAll()
	}
	r.close(func(o any) bool { _, ok := o.(*graph.Exec); return ok })
	r.close(func(o any) bool { return true })
	for i := range r.calls {
		r.out.Calls[i] = r.calls[i].Load()
	}
	if b.sys.Backend() == "virtual" {
		r.out.Reports = b.sys.Reports()
	}
	if fatal {
		return
	}
	if st, err := memory.StatsOf(b.dev); err != nil {
		r.out.Stats = "error " + kindOf(err)
	} else if st := statsText(st, r.base); st != "0 blocks, 0 bytes" {
		r.out.Stats = st
	}
	_ = b.dev.Sync(r.ctx) // of events of the allocator
	if b.closed > 20 {    // the memory that is cached for them nobody else gets
		_ = memory.EmptyCache(b.dev)
		b.closed = 0
	}
	if b.dev.Err() != nil {
		r.out.Sticky = kindOf(b.dev.Err())
	}
}

// readAll reads all memory that is open, and waits once for what it has room for.
func (r *runner) readAll() {
	b, used := r.b, 0
	for _, n := range r.order {
		x, ok := r.objs[n].(*buf)
		if !ok || x.bytes.Len() == 0 {
			continue
		}
		size := x.bytes.Len()
		if used+size > b.host.Len() {
			host := make([]byte, size)
			if x.bytes.CopyTo(b.s, host) == nil {
				r.out.Memory[n] = host
			}
			continue
		}
		part := b.host.Slice(used, used+size)
		if x.bytes.CopyToPinned(b.s, part) == nil {
			r.out.Memory[n] = part.Data()
			used += size
		}
	}
	_ = b.s.Sync(r.ctx) // the device has been waited for without an error
	for n, p := range r.out.Memory {
		r.out.Memory[n] = append([]byte(nil), p...) // the next program has the pinned memory
	}
}

// abort ends the captures that a thread may end. r.end runs on thread 0.
func (r *runner) abort(thread int) {
	for _, n := range r.order {
		rec, ok := r.objs[n].(*graph.Recording)
		if !ok {
			continue
		}
		if thread == 0 {
			_ = rec.Abort()
		} else {
			r.on(thread, func() { _ = rec.Abort() })
		}
	}
}

// close closes the objects that are chosen, in the order in which they were made.
func (r *runner) close(choose func(any) bool) {
	for _, n := range r.order {
		o := r.objs[n]
		if o == nil || !choose(o) {
			continue
		}
		delete(r.objs, n)
		if s, ok := o.(*stream.Stream); ok && gpu.StreamOf(s).Open() && r.keep(s) {
			continue
		}
		err := try(func() error { return closeObject(o) })
		res := result{Kind: kindOf(err)}
		if err != nil {
			res.Err = fmt.Sprintf("object %d: %v", n, err)
		}
		r.out.Close = append(r.out.Close, res)
	}
}

// keep keeps a stream for the next program.
func (r *runner) keep(s *stream.Stream) bool {
	_ = s.Sync(r.ctx) // tells of callbacks that have panicked
	if s == stream.Default(r.b.dev) {
		return true // nobody closes it
	}
	p, err := s.Priority()
	if err != nil || len(r.b.idle) > 8 {
		return false
	}
	r.b.idle = append(r.b.idle, idleStream{s, p})
	return true
}

func closeObject(o any) error {
	switch o := o.(type) {
	case *graph.Recording:
		return o.Abort()
	case *buf:
		return o.close()
	case *rng.Generator:
		return nil
	case interface{ Close() error }:
		return o.Close()
	}
	return nil
}

func statsText(now, base memory.Stats) string {
	return fmt.Sprintf("%d blocks, %d bytes", now.Allocation.All.Current-base.Allocation.All.Current,
		now.AllocatedBytes.All.Current-base.AllocatedBytes.All.Current)
}
