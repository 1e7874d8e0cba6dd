package gpu

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/osthread"
)

// ErrClosed is returned, wrapped with the operation, by methods after Close.
var ErrClosed = errors.New("use after Close")

// Errors has the constructors of errors about the devices of a System, whose types are public. Package
// device implements it.
type Errors interface {
	// Failed returns the error of a driver call for the device with the ordinal, or for no
	// device if the ordinal is negative.
	Failed(op string, ordinal int, r cudadrv.Result) error
	// Lost returns the sticky error that made the device unusable for the process, or nil.
	Lost(ordinal int) error
	// Captured returns the error of a call that is illegal while an object is captured
	// into a graph.
	Captured(op, object, advice string) error
	// Status returns the error for a result that did not come from a call.
	Status(r cudadrv.Result) error
	// Known reports whether err comes from Failed.
	Known(err error) bool
}

// A System is one set of devices with the libraries that drive them.
type System struct {
	*Backend
	errs Errors
	devs []*Device

	callTimeout time.Duration // see Device.DoInTime

	closed    atomic.Bool
	syncDebug atomic.Int32
	local     handle.Map // see Local
}

// SystemOf returns the System behind a public one.
func SystemOf(x handle.Has[*System]) *System { return *handle.Of(x) }

// NewSystem returns the System of a backend.
func NewSystem(b *Backend, errs Errors, callTimeout time.Duration) *System {
	return &System{Backend: b, errs: errs, callTimeout: callTimeout}
}

// Add adds the driver's device that has the next ordinal, and returns the reference for
// the public type.
func (s *System) Add(h cudadrv.Device) DeviceRef {
	d := &Device{sys: s, ordinal: len(s.devs), name: fmt.Sprintf("%s:%d", s.Name, len(s.devs)), handle: h}
	d.watcher, _ = s.Driver.(cudadrv.Watcher)
	s.devs = append(s.devs, d)
	return DeviceRef{d}
}

// Closed reports whether Close has begun to release the contexts.
func (s *System) Closed() bool { return s.closed.Load() }

// Local returns the value for the key, and calls make on first use, like Device.Local for
// one device. Close calls the Close methods of the values before it releases the contexts.
func (s *System) Local(key *handle.Key, make func() any) any {
	if v, ok := s.local.Load(key); ok {
		return v
	}
	return s.local.LoadOrStore(key, make())
}

// Close closes the values of Local and releases the contexts.
func (s *System) Close() error {
	var first error
	for _, v := range slices.Backward(s.local.Clear()) {
		if c, ok := v.(io.Closer); ok {
			first = errors.Join(first, c.Close())
		}
	}
	s.closed.Store(true)
	for _, d := range s.devs {
		if err := d.release(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// callbacks are the OS threads that are running a host callback of a stream.
var callbacks osthread.Threads

// EnterCallback records that a host callback runs on the calling OS thread, until leave.
func EnterCallback() (leave func()) { return callbacks.Enter() }

// InCallback reports whether the goroutine is in a host callback of a stream,
// which must not wait for the driver, at almost no cost while no callback runs.
func InCallback() bool { return callbacks.Has() }

// LaunchHostFunc enqueues a call of fn on the stream, after everything enqueued on s so
// far. If s is captured, fn lives as long as the graph and its launches.
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

// captureClosure returns a closure that the driver releases after the graph of the capture
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

// ErrCapturing is returned by Close of a graph that is being captured.
var ErrCapturing = errors.New("the capture has not ended")

// A Holder is a graph that holds the objects that it has captured. Close returns
// ErrCapturing if it must wait for the end of the capture.
type Holder interface {
	fmt.Stringer
	Close() error
}

// A Holdable is an object that must not be closed while a graph that captured it exists.
type Holdable interface {
	Hold(h Holder)
	LetGo(h Holder)
}

// A Preparer is a Holdable that must be called before each launch of a graph, with the
// stream of the launch. For example, a random number generator then sets its position in
// the sequence. After a successful Prepare, Launched is called once, when the launch has
// been enqueued or has failed with err; until then other calls of Prepare wait. The stream is
// a public one.
type Preparer interface {
	Holdable
	Prepare(s HasStream) error
	Launched(s HasStream, err error)
}

// A Counter is a Holdable whose Preparer knows what the graph h has captured.
type Counter interface {
	Holdable
	PreparerOf(h Holder) Preparer
}

// Uses tells the sanitizer, if there is one, which memory an operation uses that was just
// enqueued on s. Launches of package kernel need it only for memory whose address is not an
// argument. The calls of list cost nothing without the sanitizer. meets means that the operation
// waits for other devices, and they for it.
func (s *Stream) Uses(name string, meets bool, list func() []cudadrv.Use) {
	if w := s.dev.watcher; w != nil {
		w.Used(cudadrv.Operation{Name: name, Context: cudadrv.Context(s.dev.ctx.Load()), Stream: s.h, Uses: list(), Meets: meets})
	}
}

// Graphs are the graphs that have captured the work of an object. The memory of the object must stay until they are closed, because
// each launch uses it.
type Graphs struct {
	mu   sync.Mutex
	list []Holder
}

// Add records that work on s uses the object: if s is being captured, its graph holds the object until it is closed.
func (g *Graphs) Add(s *Stream) error {
	if !s.Open() { // the work itself reports it
		return nil
	}
	return s.Captured(g)
}

// Hold adds a graph.
func (g *Graphs) Hold(h Holder) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list = append(g.list, h)
}

// LetGo undoes Hold.
func (g *Graphs) LetGo(h Holder) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.list, h); i >= 0 {
		g.list = slices.Delete(g.list, i, i+1)
	}
}

// Any reports whether a graph exists.
func (g *Graphs) Any() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.list) > 0
}

// Refuse returns an error for op, which would free the memory, if a graph
// exists.
func (g *Graphs) Refuse(op string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.list) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s uses it: close the graph first", op, g.list[0])
}
