// Package handle gives every object that can be closed one lifetime rule: Close is
// explicit and idempotent. If an object becomes unreachable while it is open, the package
// reports it and frees nothing.
package handle

import (
	"fmt"
	"runtime"
	"sync/atomic"
)

// About describes an object in the report of its leak.
type About struct {
	Kind  string       // such as "stream"
	On    fmt.Stringer // its device, group or session, which costs no time to name; nil if it has none
	Bytes int          // of memory that it owns; 0 if it owns none
	// Frequent objects are made so often that recording the place of each would cost
	// too much: only with Trace does their report have one.
	Frequent bool
}

// A state is what outlives the object. It has 48 bytes, one size class of the allocator.
type state struct {
	kind   string
	on     string        // text, so that the state keeps nothing alive
	place  *place        // nil if it was not recorded
	closed atomic.Uint64 // in the lowest bit; the bytes are above it
}

// An Owner is embedded in a closable object. It must not be copied.
type Owner struct {
	_  noCopy
	st *state
}

// Init arms leak reporting for obj, whose embedded Owner is o.
func Init[T any](obj *T, o *Owner, a About) {
	st := &state{kind: a.Kind}
	if a.On != nil {
		st.on = a.On.String()
	}
	st.closed.Store(uint64(a.Bytes) << 1)
	if !a.Frequent || Trace.Load() {
		st.place = here()
	}
	o.st = st
	// The cleanup gets the separate state and not obj: a closure over obj would
	// keep it alive for ever.
	runtime.AddCleanup(obj, report, st)
}

// InitForever initializes the owner of an object that lives as long as the object that it
// belongs to. It need not be closed, and is never reported, not even after an Init.
func InitForever(o *Owner) {
	if o.st != nil {
		o.Close()
	}
	o.st = &state{}
}

// Close marks the object closed and reports whether this call was the first.
func (o *Owner) Close() bool { return o.st != nil && o.st.closed.Or(1)&1 == 0 }

// Closed reports whether Close was called, or Init never was.
func (o *Owner) Closed() bool { return o.st == nil || o.st.closed.Load()&1 == 1 }

type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}
