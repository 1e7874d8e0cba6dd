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

// Trace makes Init record the place of frequent objects too.
var Trace atomic.Bool

// A Leak describes an object that became unreachable while it was open.
type Leak struct {
	Kind  string
	On    string // "" if the object belongs to no device, group or session
	Bytes int
	Stack string // of its creation, a function and a place a line; "" if it was not recorded
}

// String says what leaked, such as "buffer of 4096 bytes on cuda:0".
func (l Leak) String() string {
	s := l.Kind
	if l.Bytes > 0 {
		s += fmt.Sprintf(" of %d bytes", l.Bytes)
	}
	if l.On != "" {
		s += " on " + l.On
	}
	return s
}

// A Name is an About.On that is only text.
type Name string

func (n Name) String() string { return string(n) }

// A place is the stack of calls that made an object.
type place [8]uintptr

// here returns the stack of the caller of Init.
func here() *place {
	p := new(place)
	runtime.Callers(3, p[:])
	return p
}

func (p *place) String() string {
	if p == nil {
		return ""
	}
	n := 0
	for n < len(p) && p[n] != 0 {
		n++
	}
	var b strings.Builder
	for fr := runtime.CallersFrames(p[:n]); n > 0; {
		f, more := fr.Next()
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
		if !more {
			break
		}
	}
	return b.String()
}

func report(st *state) {
	word := st.closed.Load()
	if word&1 == 1 {
		return
	}
	OnLeak(Leak{Kind: st.kind, On: st.on, Bytes: int(word >> 1), Stack: st.place.String()})
}

var warned sync.Map

// warnOncePerKind is the OnLeak of programs: a leak in a loop is one line.
func warnOncePerKind(l Leak) {
	if _, seen := warned.LoadOrStore(l.Kind, true); seen {
		return
	}
	made := "set CHORUS_LEAK_STACKS=yes to see its creation"
	if l.Stack != "" {
		made = "created by\n" + l.Stack
	}
	slog.Warn(fmt.Sprintf("chorus: leak: %s became unreachable before Close, so its resources are not freed; later leaks of this kind are not reported; %s", l, made))
}
