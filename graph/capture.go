package graph

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Mode says whose calls may spoil a capture: calls that CUDA cannot see to be
// harmless, such as cuMemAlloc or asking for an event. (CUstreamCaptureMode,
// torch's capture_error_mode).
type Mode int32

// The modes say whose calls are refused. The default is not torch's, which is Global:
// in a Go program other goroutines go on with their work while one captures. In the
// mode Global the first operation between the ranks of a communicator, or with a peer,
// invalidates the capture: threads of NCCL connect the ranks then, and End returns
// CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
const (
	ThreadLocal Mode = iota // of the goroutine that captures
	Global                  // of any goroutine
	Relaxed                 // nobody's
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
	Name string // in errors; "" is a number
	Mode Mode   // default ThreadLocal

	// Pool is where memory is allocated that the captured function makes. Give
	// several captures the same to let them share memory; nil is a pool of the
	// graph's own.
	Pool *memory.Pool
}

// Capture is CaptureWith the default Config.
func Capture(streams []*stream.Stream, fn func() error) (*Exec, error) {
	return CaptureWith(nil, streams, fn)
}

// CaptureWith captures what fn enqueues on the streams, and on streams that it
// lets wait for them, into a graph (torch.cuda.graph). The streams may be of
// several devices; each begins behind the first one's start, and the graph ends
// when all have. Other streams must be joined by fn: one of the given streams
// waits for them.
//
// fn is called once, on the calling goroutine, which is locked to its thread. If nothing
// was captured because fn used other streams, the error is a *NothingCapturedError. A
// function that enqueues nothing makes a graph without operations, as in torch, which
// warns of it: see Exec.Nodes. When fn returns an error or panics, the capture is
// ended, the streams are as before, and nothing is left of it.
func CaptureWith(cfg *Config, streams []*stream.Stream, fn func() error) (x *Exec, err error) {
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
		if !s.Open() {
			return s.Check(op, nil)
		}
		if s.Device().System() != streams[0].Device().System() {
			return fmt.Errorf("%s: %s and %s belong to two systems", op, streams[0], s)
		}
		if slices.Contains(streams[:i], s) {
			return fmt.Errorf("%s: %s is given twice", op, s)
		}
		if err := s.RefuseCapture(op, "captures do not nest"); err != nil {
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

	strays []string // the streams that the goroutine used and that took no part

	mu    sync.Mutex   // makes End and Abort of several goroutines come in turn
	owner handle.Owner // closed once the capture has ended
}

// Begin captures what is enqueued on s from now on, until End or Abort, one of
// which must be called (torch.cuda.CUDAGraph.capture_begin). Streams that wait
// for s take part, and s must wait for them before End. Capture is easier and
// right in every case.
//
// Unless the mode is Relaxed, Begin locks the goroutine to its thread, and End
// and Abort, which unlock it, are called by the same goroutine.
func Begin(s *stream.Stream, cfg *Config) (*Recording, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if !s.Open() {
		return nil, s.Check("graph: capture", nil)
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
		pool = memory.PrivatePool()
	}
	if err := pool.Begin(r.exec.String()); err != nil {
		return err
	}
	r.exec.pool = pool
	if mode != cudadrv.CaptureRelaxed {
		runtime.LockOSThread()
		r.tid = syscall.Gettid()
	}
	if err := r.s.BeginCapture(mode, r.exec, pool); err != nil {
		r.unlock()
		pool.End()
		return err
	}
	return nil
}

// End ends the capture and makes the graph ready to launch
// (torch.cuda.CUDAGraph.capture_end). After an error nothing is left of the
// capture, except when another goroutine called it: then it goes on.
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

// Abort ends the capture and drops what it has recorded. It is idempotent, and
// does nothing after End.
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

// expected reports whether an error at the end of a capture only says that the
// capture was no good.
func expected(err error) bool {
	return errors.Is(err, ErrorInvalidated) || errors.Is(err, ErrorUnjoined)
}

func (r *Recording) finish() (op string, err error) {
	if r.owner.Closed() {
		return "end the capture of", device.ErrClosed
	}
	if err := r.stop(); err != nil {
		if !r.owner.Closed() {
			return "end the capture of", err
		}
		return "end the capture of", errors.Join(err, r.exec.drop())
	}
	if r.exec.doomed.Load() {
		return "end the capture of", errors.Join(errDoomed, r.exec.drop())
	}
	if err := r.exec.instantiate(); err != nil {
		return "instantiate", errors.Join(err, r.exec.drop())
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

// stop ends the capture at the driver.
func (r *Recording) stop() error {
	// Not left to the driver: it refuses another thread, and the capture is lost.
	if r.tid != 0 && r.tid != syscall.Gettid() {
		return fmt.Errorf("call it on the goroutine that began the capture: %w", ErrorWrongThread)
	}
	x, err := r.s.EndCapture(r.exec)
	r.owner.Close()
	r.exec.graph, r.exec.held, r.strays = x.Graph, x.Held, x.Strays
	r.exec.pool.End()
	r.exec.own = preparers(x.Held)
	r.exec.prepare = r.exec.own
	r.unlock()
	return err
}

// unlock undoes the lock of Begin, on the thread that has it.
func (r *Recording) unlock() {
	if r.tid != 0 && r.tid == syscall.Gettid() {
		runtime.UnlockOSThread()
	}
}
