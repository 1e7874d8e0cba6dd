package gpu

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/goroutine"
)

// callbacks are the OS threads that are running a host callback of a stream.
var callbacks goroutine.Threads

// EnterCallback records that a host callback runs on the calling OS thread, until leave.
func EnterCallback() (leave func()) { return callbacks.Enter() }

// InCallback reports whether the goroutine is in a host callback of a stream, which must
// not wait for the driver. It costs almost nothing while no callback runs.
func InCallback() bool { return callbacks.Has() }

// LaunchHostFunc makes the stream call fn when everything enqueued on s so far has
// completed. If s is captured, fn lives as long as the graph and its launches.
func (s *Stream) LaunchHostFunc(fn func()) error {
	c, err := s.current()
	if err != nil {
		return err
	}
	if c == nil && s.kind == ExternalStream {
		if yes, err := s.Capturing(); err != nil {
			return err
		} else if yes { // into a graph that Chorus did not begin
			return s.dev.sys.errs.Captured("stream: callback", s.String(), "capture it with package graph")
		}
	}
	var f dl.Closure
	if c == nil {
		f = dl.OnceClosure(fn)
	} else if f, err = s.captureClosure(fn); err != nil {
		return err
	}
	err = s.dev.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.LaunchHostFunc(s.h, f) })
	if err != nil && c == nil {
		f.Release()
	}
	return err
}

// captureClosure makes a closure that the driver releases after the graph of the capture
// and all its launches are destroyed.
func (s *Stream) captureClosure(fn func()) (dl.Closure, error) {
	var g cudadrv.Graph
	err := s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		g, r = drv.StreamGetCaptureGraph(s.h)
		return r
	})
	if err != nil {
		return 0, err
	}
	f := dl.NewClosure(fn)
	var o cudadrv.UserObject
	err = s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		o, r = drv.UserObjectCreate(f)
		return r
	})
	if err != nil {
		f.Release()
		return 0, err
	}
	err = s.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.GraphRetainUserObject(g, o, 1, cudadrv.GraphUserObjectMove)
	})
	if err != nil {
		_ = s.dev.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.UserObjectRelease(o, 1) })
		return 0, err
	}
	return f, s.Captured(holdClosure(f)) // graph.Exec.Update may give it to another graph
}

// holdClosure is a closure that implements Holdable.
type holdClosure dl.Closure

func (f holdClosure) Hold(Holder)  { dl.Closure(f).Retain() }
func (f holdClosure) LetGo(Holder) { dl.Closure(f).Release() }
