package stream

import (
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

// A CallbackError is a panic of a function that a stream called.
type CallbackError struct {
	Stream string
	Panic  any
	Stack  string
}

func (e *CallbackError) Error() string {
	return fmt.Sprintf("stream: callback on %s panicked: %v\n%s", e.Stream, e.Panic, e.Stack)
}

// Unwrap returns the value of the panic if that is an error.
func (e *CallbackError) Unwrap() error {
	err, _ := e.Panic.(error)
	return err
}

// Callback calls fn when everything enqueued on s so far has completed, and lets
// what is enqueued later wait until fn has returned (cuLaunchHostFunc). It
// returns at once. When the device fails before, fn is not called.
//
// fn runs on a thread of the driver, of which other streams' callbacks may wait
// for it: it should be short. It must not use a device, nor wait for work on one,
// nor call runtime.Goexit as testing.T.FailNow does. It may close memory, and
// allocate what is cached; an allocation that needs the driver is an error there. What
// fn has written is seen after Sync. A panic in fn ends fn only; the next Sync or Query of s that finds
// the work completed returns it, as a *CallbackError.
//
// While s is captured into a graph, fn becomes part of it: each launch calls it,
// and it lives as long as the graph and its launches.
func (s *Stream) Callback(fn func()) error {
	const op = "stream: callback"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("%s on %s: no function given", op, s)
	}
	c, err := s.current()
	if err != nil {
		return err
	}
	if c == nil && s.kind == external {
		if yes, err := s.capturing(); err != nil {
			return err
		} else if yes { // into a graph that Chorus does not know
			return &CaptureError{Op: op, Object: s.String(), Advice: "capture it with package graph"}
		}
	}
	var f dl.Closure
	if c == nil {
		f = dl.OnceClosure(s.guard(fn))
	} else if f, err = s.captureClosure(s.guard(fn)); err != nil {
		return err
	}
	err = s.dev.Do("cuLaunchHostFunc", func(drv cudadrv.Driver) cudadrv.Result { return drv.LaunchHostFunc(s.h, f) })
	if err != nil && c == nil {
		f.Release()
	}
	return err
}

// guard keeps a panic from the C code that calls fn.
func (s *Stream) guard(fn func()) func() {
	return func() {
		defer enterCallback()()
		defer func() {
			if v := recover(); v != nil {
				s.panicked.CompareAndSwap(nil, &CallbackError{Stream: s.String(), Panic: v, Stack: string(debug.Stack())})
			}
			s.called.Add(1)
		}()
		fn()
	}
}

// callbacks are the OS threads that are within a Callback.
var callbacks struct {
	count   atomic.Int32 // how many there are, for a look without a lock
	threads sync.Map     // their numbers
}

func enterCallback() (leave func()) {
	tid := syscall.Gettid()
	callbacks.threads.Store(tid, true)
	callbacks.count.Add(1)
	return func() {
		callbacks.count.Add(-1)
		callbacks.threads.Delete(tid)
	}
}

// InCallback reports whether the goroutine is within the function of a Callback, which
// must not wait for the driver. It costs next to nothing while none is called. For
// Chorus's own packages.
func InCallback() bool {
	if callbacks.count.Load() == 0 {
		return false
	}
	_, ok := callbacks.threads.Load(syscall.Gettid())
	return ok
}

// seeCallbacks is the end of a wait for the stream: the error, or else the panic
// of a callback.
func (s *Stream) seeCallbacks(err error) error {
	if s.called.Load() == 0 || err != nil { // the load orders what callbacks wrote before what follows
		return err
	}
	if p := s.panicked.Swap(nil); p != nil {
		return p
	}
	return nil
}

// captureClosure makes a closure that the driver releases when the graph into
// which s is captured is gone with all its launches.
func (s *Stream) captureClosure(fn func()) (dl.Closure, error) {
	var g cudadrv.Graph
	err := s.dev.Do("cuStreamGetCaptureInfo", func(drv cudadrv.Driver) (r cudadrv.Result) {
		g, r = drv.StreamGetCaptureGraph(s.h)
		return r
	})
	if err != nil {
		return 0, err
	}
	f := dl.NewClosure(fn)
	var o cudadrv.UserObject
	err = s.dev.Do("cuUserObjectCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
		o, r = drv.UserObjectCreate(f)
		return r
	})
	if err != nil {
		f.Release()
		return 0, err
	}
	err = s.dev.Do("cuGraphRetainUserObject", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.GraphRetainUserObject(g, o, 1, cudadrv.GraphUserObjectMove)
	})
	if err != nil {
		_ = s.dev.Do("cuUserObjectRelease", func(drv cudadrv.Driver) cudadrv.Result { return drv.UserObjectRelease(o, 1) })
		return 0, err
	}
	return f, s.Captured(holdClosure(f)) // graph.Exec.Update lets another graph use it
}

// holdClosure makes a closure Holdable.
type holdClosure dl.Closure

func (f holdClosure) Hold(Holder)  { dl.Closure(f).Retain() }
func (f holdClosure) LetGo(Holder) { dl.Closure(f).Release() }
