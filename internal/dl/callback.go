package dl

import (
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"
)

// Callback returns a C function pointer that calls fn, whose parameters and at
// most one result are integers or addresses. A process can make some 2000 and
// none is ever freed, so it is for the few that live as long as the process.
// C may call it on any thread; a panic in fn ends the process.
func Callback(fn any) uintptr { return purego.NewCallback(fn) }

// A Closure is a Go function that C may call by a number, void fn(void *closure),
// so that any number of them share one C function pointer.
type Closure uintptr

var closures struct {
	last atomic.Uintptr
	byID sync.Map // Closure to *held
}

// held is a function and those who need it.
type held struct {
	fn   func()
	refs atomic.Int32
	once bool
}

// NewClosure gives fn a number, for the caller's reference and until the last one
// is released.
func NewClosure(fn func()) Closure { return newClosure(fn, false) }

// OnceClosure is NewClosure for a function whose call releases it.
func OnceClosure(fn func()) Closure { return newClosure(fn, true) }

func newClosure(fn func(), once bool) Closure {
	c := Closure(closures.last.Add(1))
	h := &held{fn: fn, once: once}
	h.refs.Store(1)
	closures.byID.Store(c, h)
	return c
}

// Call calls the function, as C does by way of CallClosure. A number that was
// released is nothing.
func (c Closure) Call() {
	h, ok := c.held()
	if !ok {
		return
	}
	if h.once {
		defer c.Release()
	}
	h.fn()
}

// Retain adds a reference.
func (c Closure) Retain() {
	if h, ok := c.held(); ok {
		h.refs.Add(1)
	}
}

// Release gives a reference up.
func (c Closure) Release() {
	if h, ok := c.held(); ok && h.refs.Add(-1) == 0 {
		closures.byID.Delete(c)
	}
}

func (c Closure) held() (*held, bool) {
	v, ok := closures.byID.Load(c)
	if !ok {
		return nil, false
	}
	return v.(*held), true
}

// CallClosure and ReleaseClosure return the C functions that call and release a Closure
// by its number.
var (
	CallClosure    = sync.OnceValue(func() uintptr { return Callback(func(c uintptr) { Closure(c).Call() }) })
	ReleaseClosure = sync.OnceValue(func() uintptr { return Callback(func(c uintptr) { Closure(c).Release() }) })
)
