package gpu

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// ErrClosed is returned, wrapped with the operation, by methods after Close.
var ErrClosed = errors.New("use after Close")

// Errors makes the errors of the devices of a System, whose types are public. Package
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
	*backend.System
	errs Errors
	devs []*Device

	callTimeout time.Duration // see Device.DoInTime

	closed    atomic.Bool
	syncDebug atomic.Int32
	local     kept.Map // see Local
}

// A SystemRef refers to a System. The public type embeds it.
type SystemRef struct{ s *System }

func (r SystemRef) system() *System { return r.s }

// HasSystem is implemented by the public type that embeds a SystemRef.
type HasSystem interface{ system() *System }

// SystemOf returns the System behind a public one.
func SystemOf(x HasSystem) *System { return x.system() }

// NewSystem makes the System of a backend, and the reference for the public type.
func NewSystem(b *backend.System, errs Errors, callTimeout time.Duration) (*System, SystemRef) {
	s := &System{System: b, errs: errs, callTimeout: callTimeout}
	return s, SystemRef{s}
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
func (s *System) Local(key *kept.Key, make func() any) any {
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
