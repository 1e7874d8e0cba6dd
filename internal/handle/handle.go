// Package handle gives everything that can be closed one lifetime rule: Close
// is explicit and idempotent, and an object that becomes unreachable while it
// is open is reported, never freed behind its owner's back.
package handle

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
)

// OnLeak is called, once per object, when an open object becomes unreachable.
// It must not be changed while objects are alive; tests set it at their start.
var OnLeak = warnOncePerKind

// Trace turns on creation stacks; only tests set it.
var Trace atomic.Bool

type state struct {
	kind   string
	closed atomic.Bool
	pcs    []uintptr
}

// An Owner is embedded in a closable object. It must not be copied.
type Owner struct {
	_  noCopy
	st *state
}

// Init arms leak reporting for obj, whose embedded Owner is o.
func Init[T any](obj *T, o *Owner, kind string) {
	st := &state{kind: kind}
	if Trace.Load() {
		st.pcs = make([]uintptr, 16)
		st.pcs = st.pcs[:runtime.Callers(3, st.pcs)]
	}
	o.st = st
	// The cleanup gets the separate state and not obj: a closure over obj would
	// keep it alive for ever.
	runtime.AddCleanup(obj, report, st)
}

// InitForever arms the owner of an object that lives as long as what it belongs
// to. Nobody has to close it, and it is never reported.
func InitForever(o *Owner) { o.st = &state{} }

func report(st *state) {
	if !st.closed.Load() {
		OnLeak(st.kind, stack(st.pcs))
	}
}

// Close marks the object closed and reports whether this call was the first.
func (o *Owner) Close() bool { return o.st != nil && o.st.closed.CompareAndSwap(false, true) }

// Closed reports whether Close was called, or Init never was.
func (o *Owner) Closed() bool { return o.st == nil || o.st.closed.Load() }

func stack(pcs []uintptr) string {
	if len(pcs) == 0 {
		return ""
	}
	var b strings.Builder
	for fr := runtime.CallersFrames(pcs); ; {
		f, more := fr.Next()
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
		if !more {
			return b.String()
		}
	}
}

var warned sync.Map

// warnOncePerKind is the OnLeak of programs: a leak in a loop is one line.
func warnOncePerKind(kind, _ string) {
	if _, seen := warned.LoadOrStore(kind, true); !seen {
		slog.Warn("chorus: a " + kind + " became unreachable without Close; what it owns is not freed")
	}
}

type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}
