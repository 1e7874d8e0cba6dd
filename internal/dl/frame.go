package dl

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/ebitengine/purego"
)

const (
	maxWords = 32 // the maximum of purego
	maxCells = 4
	maxKept  = 8

	// A struct of more than 16 bytes: the C convention of amd64 passes its value on the stack,
	// and the convention of arm64 passes a pointer to a copy.
	structOnStack = runtime.GOARCH == "amd64"
	intRegisters  = 6 // of amd64
	structWords   = 16
)

// A Frame holds the arguments of one C call as the C prototype orders them. Frames are
// pooled, so that a call allocates nothing. A frame that was returned to the pool by Put
// or a Do method must not be used again.
type Frame struct {
	crossing
	cells                   [maxCells]uint64        // out-parameters of up to 8 bytes
	kept                    [maxKept]unsafe.Pointer // host memory that must live until the call returns
	block                   [structWords]uintptr    // the struct passed by value
	nblock                  int                     // its words
	ncells, nkept, nstructs int
}

// A crossing has the arguments of one call from Go to C. Assembly depends on its fields.
type crossing struct {
	fn      uintptr
	before  uintptr // called with subject first, unless 0; if it returns a nonzero result, fn is not called
	subject uintptr
	nwords  uintptr
	words   [maxWords]uintptr
	result  uintptr
}

var frames = sync.Pool{New: func() any { return new(Frame) }}

// Get returns an empty frame.
func Get() *Frame { return frames.Get().(*Frame) }

// Put returns the frame to the pool, as the Do methods do.
func (f *Frame) Put() {
	clear(f.words[:f.nwords])
	clear(f.kept[:f.nkept])
	f.before, f.nwords, f.ncells, f.nkept, f.nstructs = 0, 0, 0, 0, 0
	frames.Put(f)
}

// In appends arguments that are passed by value. A signed argument is sign-extended as in
// uintptr(int32(-1)): C reads the low bits only.
func (f *Frame) In(v ...uintptr) *Frame {
	if int(f.nwords)+len(v) > maxWords {
		panic("dl: a C call of more than 32 argument words")
	}
	f.nwords += uintptr(copy(f.words[f.nwords:], v))
	return f
}

// Out appends the address of the next cell, zeroed: an out-parameter of up to 8 bytes. C
// must have written it when the call returns; if C may write later, pass memory of the
// caller by Ptr.
func (f *Frame) Out() *Frame { return f.InOut(0) }

// InOut is Out with a value for C to read.
func (f *Frame) InOut(v uint64) *Frame {
	if f.ncells == maxCells {
		panic("dl: a C call of more than 4 out cells")
	}
	f.cells[f.ncells] = v
	f.ncells++
	return f.In(uintptr(unsafe.Pointer(&f.cells[f.ncells-1])))
}

// Ptr appends an address of host memory. The frame keeps a Go object there alive until the
// call returns. Storing the pointer moves the object to the heap, where it does not move.
func (f *Frame) Ptr(p unsafe.Pointer) *Frame {
	return f.In(uintptr(f.keep(p)))
}

func (f *Frame) keep(p unsafe.Pointer) unsafe.Pointer {
	if f.nkept == maxKept {
		panic("dl: a C call of more than 8 pointers")
	}
	f.kept[f.nkept] = p
	f.nkept++
	return p
}

// String appends the address of a NUL-terminated copy of s.
func (f *Frame) String(s string) *Frame {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return f.Ptr(unsafe.Pointer(&b[0]))
}

// Strings appends a count and the address of an array of NUL-terminated
// strings, int n, const char *const *v.
func (f *Frame) Strings(list []string) *Frame {
	if len(list) == 0 {
		return f.In(0, 0)
	}
	// C may get Go memory with Go pointers only if the pointed-to objects do not move, so
	// all strings are stored in one object that the frame keeps.
	var text []byte
	for _, s := range list {
		text = append(append(text, s...), 0)
	}
	base := uintptr(f.keep(unsafe.Pointer(&text[0])))
	array, at := make([]uintptr, len(list)), uintptr(0)
	for i, s := range list {
		array[i] = base + at
		at += uintptr(len(s)) + 1
	}
	return f.In(uintptr(len(list))).Ptr(unsafe.Pointer(&array[0]))
}

// Struct128 appends a 128-byte struct by value, such as ncclUniqueId. A call can have one
// struct, with at most 6 other words.
func (f *Frame) Struct128(p *[128]byte) *Frame { return f.byValue(p[:]) }

// Struct64 is Struct128 for a 64-byte struct, such as CUipcEventHandle.
func (f *Frame) Struct64(p *[64]byte) *Frame { return f.byValue(p[:]) }

func (f *Frame) byValue(b []byte) *Frame {
	f.nblock = len(b) / int(unsafe.Sizeof(f.block[0]))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&f.block)), len(b)), b)
	f.nstructs++
	if structOnStack {
		return f // Call stores it after the register arguments
	}
	return f.In(uintptr(unsafe.Pointer(&f.block)))
}

// Call runs the C function and returns its result word. The frame stays valid for Word;
// the caller calls Put.
func (f *Frame) Call(fn uintptr) uintptr {
	if f.nstructs > 0 {
		f.placeStruct()
	}
	f.fn = fn
	f.cross()
	return f.result
}

func (f *Frame) placeStruct() {
	if f.nstructs > 1 {
		panic("dl: a C call of more than one struct by value")
	}
	if !structOnStack {
		return
	}
	if f.nwords > intRegisters {
		panic("dl: a C call of a struct by value beside more than 6 words")
	}
	f.nwords = intRegisters + uintptr(copy(f.words[intRegisters:], f.block[:f.nblock]))
}

// Word returns the out cell i, counted from 0 as Out added them.
func (f *Frame) Word(i int) uint64 { return f.cells[i] }

// Do calls a function that returns an int, and returns the frame to the pool.
func (f *Frame) Do(fn uintptr) int32 { return int32(f.do(fn)) }

// Do1 is Do for a function with one out-parameter.
func (f *Frame) Do1(fn uintptr) (uint64, int32) {
	v, r := f.do1(fn)
	return v, int32(r)
}

// Do2 is Do for a function with two out-parameters.
func (f *Frame) Do2(fn uintptr) (uint64, uint64, int32) {
	v, w, r := f.do2(fn)
	return v, w, int32(r)
}

func (f *Frame) do(fn uintptr) uintptr {
	r := f.Call(fn)
	f.Put()
	return r
}

func (f *Frame) do1(fn uintptr) (uint64, uintptr) {
	r := f.Call(fn)
	v := f.cells[0]
	f.Put()
	return v, r
}

func (f *Frame) do2(fn uintptr) (uint64, uint64, uintptr) {
	r := f.Call(fn)
	v, w := f.cells[0], f.cells[1]
	f.Put()
	return v, w, r
}

// DoString calls a function that returns a NUL-terminated string, copies the
// string, which is "" for NULL, and returns the frame to the pool.
func (f *Frame) DoString(fn uintptr) string {
	s := GoString(f.Call(fn))
	f.Put()
	return s
}

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

// NewClosure returns a closure of fn with one reference, owned by the caller,
// which exists until the last reference is released.
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

// Call calls the function, as C does through CallClosure, unless the closure is
// released.
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

// Pointer converts an address from C to a pointer. The memory must belong to C: the
// garbage collector neither moves nor frees it.
func Pointer(address uint64) unsafe.Pointer {
	// Not unsafe.Pointer(uintptr), which go vet reports.
	return *(*unsafe.Pointer)(unsafe.Pointer(&address))
}

// GoString copies the NUL-terminated string at a C address; 0 is "".
func GoString(address uintptr) string {
	if address == 0 {
		return ""
	}
	p := Pointer(uint64(address))
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// CString returns the text of a buffer that C filled, up to its first NUL.
func CString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// CallErrno calls a function that returns a word and sets errno on failure. The Errno is 0
// if the function did not set errno. A missing function returns ENOSYS, as a missing
// system call does. The frame is returned to the pool.
func (t *Table[N, R]) CallErrno(n N, f *Frame) (uintptr, syscall.Errno) {
	if !t.Has(n) {
		f.Put()
		return ^uintptr(0), syscall.ENOSYS
	}
	// errno belongs to the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f.before, f.subject = t.before, t.subject
	errno := errnoOfThread()
	if errno == nil {
		return f.do(t.fns[n]), 0
	}
	*errno = 0
	r := f.do(t.fns[n])
	return r, syscall.Errno(*errno)
}

// errnoOfThread returns the address of the calling thread's errno, or nil if it is
// unknown.
func errnoOfThread() *int32 {
	fn := errnoLocation()
	if fn == 0 {
		return nil
	}
	return (*int32)(Pointer(uint64(Get().do(fn))))
}
