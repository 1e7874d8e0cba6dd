package dl

import (
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"
)

// Callback returns a C function pointer that calls fn. Its parameters and its optional
// result must be integers or addresses. A process can make about 2000 callbacks and none
// is ever freed, so use it only for functions that live as long as the process. C may call
// it on any thread; a panic in fn ends the process.
func Callback(fn any) uintptr { return purego.NewCallback(fn) }

// A Closure identifies a Go function that C may call as void fn(void *closure). All
// closures share one C function pointer.
type Closure uintptr

var closures struct {
	last atomic.Uintptr
	byID sync.Map // Closure to *held
}

// held is a function with its reference count.
type held struct {
	fn   func()
	refs atomic.Int32
	once bool
}

// NewClosure makes a closure of fn with one reference, for the caller. It exists until the
// last reference is released.
func NewClosure(fn func()) Closure { return newClosure(fn, false) }

// OnceClosure is NewClosure for a function whose call releases the reference.
func OnceClosure(fn func()) Closure { return newClosure(fn, true) }

func newClosure(fn func(), once bool) Closure {
	c := Closure(closures.last.Add(1))
	h := &held{fn: fn, once: once}
	h.refs.Store(1)
	closures.byID.Store(c, h)
	return c
}

// Call calls the function, as C does through CallClosure. It does nothing for a released
// closure.
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

// Release drops a reference.
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
