package graph

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Mode selects the goroutines whose unsafe calls CUDA refuses during a capture
// (CUstreamCaptureMode, torch's capture_error_mode). Unsafe calls could affect the capture,
// such as cuMemAlloc or querying an event.
type Mode int32

// The modes. The default is not torch's, which is Global, because in a Go program other
// goroutines continue to work during a capture. In the mode Global the first operation
// between the ranks of a communicator, or with a peer, invalidates the capture, because
// threads of NCCL connect the ranks then. End returns
// CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
const (
	ThreadLocal Mode = iota // of the capturing goroutine
	Global                  // of any goroutine
	Relaxed                 // of no goroutine
)

// String returns torch's name of the mode.
func (m Mode) String() string {
	switch m {
	case ThreadLocal:
		return "thread_local"
	case Global:
		return "global"
	case Relaxed:
		return "relaxed"
	}
	return fmt.Sprintf("Mode(%d)", int32(m))
}

func (m Mode) raw() (cudadrv.CaptureMode, error) {
	switch m {
	case ThreadLocal:
		return cudadrv.CaptureThreadLocal, nil
	case Global:
		return cudadrv.CaptureGlobal, nil
	case Relaxed:
		return cudadrv.CaptureRelaxed, nil
	}
	return 0, fmt.Errorf("graph: capture: %v is none of thread_local, global and relaxed", m)
}

// Config are the options of a capture; nil means their zero values.
type Config struct {
	Name string // in errors; "" means a number
	Mode Mode   // default ThreadLocal

	// Pool is the pool for memory that the captured function allocates. Captures with the
	// same Pool share its memory; nil means a separate pool for the graph.
	Pool *memory.Pool
}

// Capture captures the operations that fn enqueues on the streams, and on streams that fn
// makes wait for them, into a graph (torch.cuda.graph). The streams may be on several
// devices. The capture begins on the first stream; the others wait for it, and it waits
// for them at the end. fn must join any other stream: one of the given streams must wait
// for it.
//
// fn is called once, on the calling goroutine, which is locked to its thread. If nothing
// was captured because fn used other streams, the error is a *NothingCapturedError. A
// function that enqueues nothing makes a graph without operations; torch prints a warning
// in this case: see Exec.Nodes. If fn returns an error or panics, the capture is ended and
// discarded, and the streams can be used as before.
func Capture(streams []*stream.Stream, fn func() error, cfg *Config) (x *Exec, err error) {
	if err := checkStreams(streams, fn); err != nil {
		return nil, err
	}
	r, err := Begin(streams[0], cfg)
	if err != nil {
		return nil, err
	}
	defer func() {
		if x == nil { // fn may also have panicked
			if e := r.Abort(); e != nil {
				err = errors.Join(err, e)
			}
		}
	}()
	for _, s := range streams[1:] {
		if err := s.WaitStream(streams[0]); err != nil {
			return nil, fmt.Errorf("graph: fork %s to %s: %w", r.exec, s, err)
		}
	}
	if err := fn(); err != nil {
		return nil, err
	}
	for _, s := range streams[1:] {
		if err := streams[0].WaitStream(s); err != nil {
			return nil, fmt.Errorf("graph: join %s to %s: %w", s, r.exec, err)
		}
	}
	return r.End()
}

func checkStreams(streams []*stream.Stream, fn func() error) error {
	const op = "graph: capture"
	if len(streams) == 0 || fn == nil {
		return fmt.Errorf("%s: want at least one stream and a function", op)
	}
	for i, s := range streams {
		if s == nil || !gpu.StreamOf(s).Open() {
			return gpu.CheckStream(op, s, nil)
		}
		if s.Device().System() != streams[0].Device().System() {
			return fmt.Errorf("%s: %s and %s belong to two systems", op, streams[0], s)
		}
		if slices.Contains(streams[:i], s) {
			return fmt.Errorf("%s: %s is given twice", op, s)
		}
		if err := gpu.StreamOf(s).RefuseCapture(op, "captures do not nest"); err != nil {
			return err
		}
	}
	return nil
}

// A Recording is a capture that has begun.
type Recording struct {
	exec *Exec
	s    *stream.Stream
	tid  int // the thread that the goroutine is locked to, or 0

	strays []string // the streams that the goroutine used outside of the capture

	mu    sync.Mutex   // serializes End and Abort
	owner handle.Owner // closed once the capture has ended
}

// Begin captures the operations that are enqueued on s from now on, until End or Abort
// (torch.cuda.CUDAGraph.capture_begin). The caller must call one of these two. Streams
// that wait for s take part, and s must wait for them before End. Capture is easier and
// handles all cases.
//
// Unless the mode is Relaxed, Begin locks the goroutine to its thread. End and Abort
// unlock it, so the same goroutine must call them.
func Begin(s *stream.Stream, cfg *Config) (*Recording, error) {
	c := *cmp.Or(cfg, new(Config))
	if s == nil || !gpu.StreamOf(s).Open() {
		return nil, gpu.CheckStream("graph: capture", s, nil)
	}
	mode, err := c.Mode.raw()
	if err != nil {
		return nil, err
	}
	r := &Recording{exec: newExec(c.Name, s.Device()), s: s}
	if err := r.begin(mode, c.Pool); err != nil {
		return nil, fmt.Errorf("graph: begin to capture %s on %s: %w", r.exec, s, err)
	}
	handle.Init(r, &r.owner, handle.About{Kind: "graph recording", On: s.Device()})
	return r, nil
}

func (r *Recording) begin(mode cudadrv.CaptureMode, pool *memory.Pool) error {
	if pool == nil {
		var private memory.PoolConfig
		inside.MakePrivate(&private)
		pool = memory.NewPool(&private)
	}
	captures := inside.PoolOf(pool)
	if captures == nil {
		return fmt.Errorf("memory: allocate from a pool: %w", device.ErrClosed)
	}
	if err := captures.Begin(r.exec.String()); err != nil {
		return err
	}
	r.exec.pool = pool
	if mode != cudadrv.CaptureRelaxed {
		runtime.LockOSThread()
		r.tid = syscall.Gettid()
	}
	if err := gpu.StreamOf(r.s).BeginCapture(mode, r.exec, captures); err != nil {
		r.unlock()
		captures.End()
		return err
	}
	return nil
}

// End ends the capture and makes the graph ready to launch
// (torch.cuda.CUDAGraph.capture_end). After an error the capture has ended and is
// discarded, unless the wrong goroutine called End: then the capture continues.
func (r *Recording) End() (*Exec, error) {
	if r == nil {
		return nil, errors.New("graph: end a capture: no recording given")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	op, err := r.finish()
	if _, ok := errors.AsType[*NothingCapturedError](err); ok {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("graph: %s %s on %s: %w", op, r.exec, r.s, err)
	}
	r.exec.ready()
	return r.exec, nil
}

// Abort ends the capture and discards it. It is idempotent, and does nothing after End.
func (r *Recording) Abort() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.owner.Closed() {
		return nil
	}
	err := r.stop()
	if r.owner.Closed() {
		if expected(err) {
			err = nil
		}
		err = errors.Join(err, r.exec.drop())
	}
	if err != nil {
		return fmt.Errorf("graph: abort the capture of %s on %s: %w", r.exec, r.s, err)
	}
	return nil
}

// expected reports whether an error at the end of a capture only says that the capture is
// invalid.
func expected(err error) bool {
	return errors.Is(err, ErrorInvalidated) || errors.Is(err, ErrorUnjoined)
}

func (r *Recording) finish() (op string, err error) {
	if r.owner.Closed() {
		return "end the capture of", device.ErrClosed
	}
	op = "end the capture of"
	err = gpu.Make(func() error {
		if err := r.stop(); err != nil {
			return err
		}
		if r.exec.doomed.Load() {
			return errDoomed
		}
		op = "instantiate"
		return r.exec.instantiate()
	})
	if err != nil && !r.owner.Closed() {
		return op, err
	}
	if err != nil {
		return op, errors.Join(err, r.exec.drop())
	}
	if r.exec.nodes == 0 && len(r.strays) > 0 {
		err := &NothingCapturedError{Graph: r.exec.String(), Stream: r.s.String(), Used: r.strays}
		if e := r.exec.drop(); e != nil {
			return "drop", errors.Join(err, e)
		}
		return "", err
	}
	return "", nil
}

var errDoomed = errors.New("a communicator with operations in it was aborted meanwhile")

// stop ends the capture in the driver.
func (r *Recording) stop() error {
	// Checked here: the driver would refuse another thread and lose the capture.
	if r.tid != 0 && r.tid != syscall.Gettid() {
		return fmt.Errorf("call it on the goroutine that began the capture: %w", ErrorWrongThread)
	}
	x, err := gpu.StreamOf(r.s).EndCapture(r.exec)
	r.owner.Close()
	r.exec.graph, r.exec.held, r.strays = x.Graph, x.Held, x.Strays
	inside.PoolOf(r.exec.pool).End()
	r.exec.own = r.exec.preparers(x.Held)
	r.exec.prepare = r.exec.own
	r.unlock()
	return err
}

// unlock undoes the lock of Begin, on the locked thread.
func (r *Recording) unlock() {
	if r.tid != 0 && r.tid == syscall.Gettid() {
		runtime.UnlockOSThread()
	}
}

// The status codes of captures, for errors.Is.
const (
	ErrorUnsupported = device.Status(cudadrv.ErrorStreamCaptureUnsupported) // also matched by a *device.CaptureError
	ErrorInvalidated = device.Status(cudadrv.ErrorStreamCaptureInvalidated)
	ErrorMerge       = device.Status(cudadrv.ErrorStreamCaptureMerge)
	ErrorUnjoined    = device.Status(cudadrv.ErrorStreamCaptureUnjoined)
	ErrorIsolation   = device.Status(cudadrv.ErrorStreamCaptureIsolation)
	ErrorWrongThread = device.Status(cudadrv.ErrorStreamCaptureWrongThread)
	ErrorUpdate      = device.Status(cudadrv.ErrorGraphExecUpdateFailure)
)

// An UpdateError reports why a graph cannot get the operations of another graph.
type UpdateError struct {
	Graph, Other string
	Reason       string // such as "a node is of another type"
	Err          error
}

func (e *UpdateError) Error() string {
	return fmt.Sprintf("graph: update %s from %s: %s: %v", e.Graph, e.Other, e.Reason, e.Err)
}

// Unwrap returns the driver's error.
func (e *UpdateError) Unwrap() error { return e.Err }

// A NothingCapturedError reports that a capture is empty because the capturing goroutine
// used other streams.
type NothingCapturedError struct {
	Graph  string
	Stream string   // the captured stream
	Used   []string // the streams that were used instead
}

func (e *NothingCapturedError) Error() string {
	return fmt.Sprintf("graph: end the capture of %s on %s: nothing was captured: the function used %s, which took no part: capture these streams, or let them wait for %[2]s first",
		e.Graph, e.Stream, strings.Join(e.Used, ", "))
}
