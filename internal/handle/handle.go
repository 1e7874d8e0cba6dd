// Package handle gives every object that can be closed one lifetime rule: Close is
// explicit and idempotent. If an object becomes unreachable while it is open, the package
// reports it and frees nothing. A Key stores values of one package with objects of another
// one; a lookup takes no lock and a few nanoseconds. A Ref connects an object that users have
// with its internals, which other packages use.
package handle

import (
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
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

// OnLeak is called, once per object, when an open object becomes unreachable.
// It must not be changed while objects are alive; tests set it at their start.
var OnLeak = warnOncePerKind

// Trace lets Init record the place of frequent objects too.
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

// Module is the start of the names of Chorus's functions.
const Module = "github.com/gochorus/chorus/"

// OfLibrary reports whether a function belongs to Chorus's packages, without its programs, examples and tests. The name is not
// sufficient: a closure of a function that the compiler has inlined is named after the function of the program that calls it,
// such as main.train.Send[...].func1. Its file is still that of the library.
func OfLibrary(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return false
	}
	if name, ours := strings.CutPrefix(f.Function, Module); ours {
		return !strings.HasPrefix(name, "examples/") && !strings.HasPrefix(name, "cmd/")
	}
	file, ours := strings.CutPrefix(f.File, root())
	top, _, nested := strings.Cut(file, "/")
	return ours && nested && slices.Contains(folders, top)
}

// folders have the packages of the library. Other folders may have programs, also of users.
var folders = []string{"amp", "checkpoint", "cluster", "comm", "ddp", "device", "gds", "graph", "health", "internal", "kernel", "memory",
	"nccl", "nvtx", "optim", "perf", "rng", "stream", "tensor", "timeline"}

// root is the folder of Chorus's source, with a slash, as the compiler has recorded it.
var root = sync.OnceValue(func() string {
	_, file, _, _ := runtime.Caller(0)
	return strings.TrimSuffix(file, "internal/handle/handle.go")
})

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

// A Key identifies the values that one package stores with the objects of another package.
// Keys are compared by address: each one is a package variable.
type Key struct{ _ byte }

// A Map is for few keys that are looked up often and rarely added: a lookup compares all
// keys. Its methods may be called by any goroutine. The zero value is empty. A Map must not
// be copied.
type Map struct {
	mu   sync.Mutex // held while the list is changed
	list atomic.Pointer[[]entry]
}

type entry struct {
	key   *Key
	value any
}

// Load returns the value of a key.
func (m *Map) Load(key *Key) (value any, ok bool) {
	if list := m.list.Load(); list != nil {
		for i := range *list {
			if e := &(*list)[i]; e.key == key {
				return e.value, true
			}
		}
	}
	return nil, false
}

// LoadOrMake returns the value of a key, and makes it if necessary. Other goroutines that
// add a key wait meanwhile; make must not add one itself. After an error the key has no
// value.
func (m *Map) LoadOrMake(key *Key, make func() (any, error)) (any, error) {
	if v, ok := m.Load(key); ok {
		return v, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, ok := m.Load(key); ok {
		return v, nil
	}
	v, err := make()
	if err != nil {
		return nil, err
	}
	m.store(key, v)
	return v, nil
}

// LoadOrStore returns the value of a key, which is value if there was none.
func (m *Map) LoadOrStore(key *Key, value any) any {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, ok := m.Load(key); ok {
		return v
	}
	m.store(key, value)
	return value
}

func (m *Map) store(key *Key, value any) {
	var list []entry
	if old := m.list.Load(); old != nil {
		list = slices.Clone(*old)
	}
	list = append(list, entry{key, value})
	m.list.Store(&list)
}

// Clear removes all keys and returns their values in the order they were added.
func (m *Map) Clear() (values []any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if list := m.list.Swap(nil); list != nil {
		for _, e := range *list {
			values = append(values, e.value)
		}
	}
	return values
}

// A Ref holds the internals of a public type, which other packages of Chorus use and users do not see. The zero
// Ref holds the zero T.
//
// The public type embeds a Ref, by an alias that is not exported, so neither the field nor its
// method is visible. Code that has a public value calls [Of], which infers the type of the internals
// from the method that the Ref promotes.
//
// Of costs a call through the method table of an interface, because the compiler does not inline such a call in
// generic code. The three bridges that each operation and each allocation crosses several times
// (gpu.StreamOf, gpu.DeviceOf and the buffers of package inside) therefore are not generic.
type Ref[T any] struct{ value T }

// NewRef returns a Ref with the given internals.
func NewRef[T any](value T) Ref[T] { return Ref[T]{value} }

func (r *Ref[T]) inside() *T { return &r.value }

// A Has is a pointer to a public value whose internals are a T.
type Has[T any] interface{ inside() *T }

// Of returns the internals of a public value, in place.
func Of[T any](x Has[T]) *T { return x.inside() }
