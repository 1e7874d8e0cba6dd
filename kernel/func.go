package kernel

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Func launches a kernel of a Source with arguments of type A. Define makes it. It may be
// used by several goroutines.
type Func[A any] struct{ t *typed }

// Define adds a kernel to src, which is not compiled yet, and returns the function that
// launches it on every device that Compile has compiled src for.
//
// A is a struct with a field for each parameter of the kernel, in order: a memory.Slice for
// a pointer, and a Go number for a number. Compile compares types, order and names with
// the declaration in the source. For pointers to other memory and for structs, add a [Def]
// to src.Kernels instead.
//
// standIn implements the kernel on virtual devices: it does the work of the whole grid, and
// gets the arguments of the launch. There, slices have only Len, Bytes and Slice; [Data] returns
// their elements. It may be nil if the program does not use virtual devices.
func Define[A any](src *Source, name string, standIn func(c *Call, a A)) *Func[A] {
	t := &typed{name: name}
	if t.fields, t.err = fieldsOf(reflect.TypeFor[A]()); standIn != nil {
		t.call = func(c *Call, inputs []bool) {
			var a A
			decode(t.fields, c, unsafe.Pointer(&a), inputs)
			standIn(c, a)
		}
	}
	def := Def{Name: name, typed: t}
	for _, f := range t.fields {
		def.Params = append(def.Params, f.param)
	}
	src.Kernels = append(src.Kernels, def)
	return &Func[A]{t}
}

// Launch enqueues the kernel on s and returns at once. It is [Kernel.Launch] with the fields of
// args as arguments.
func (f *Func[A]) Launch(s *stream.Stream, g Grid, args A) error {
	return f.typed().launch(s, g, unsafe.Pointer(&args), false)
}

// LaunchCooperative is [Kernel.LaunchCooperative] with the fields of args as arguments.
func (f *Func[A]) LaunchCooperative(s *stream.Stream, g Grid, args A) error {
	return f.typed().launch(s, g, unsafe.Pointer(&args), true)
}

func (f *Func[A]) typed() *typed {
	if f == nil {
		return nil
	}
	return f.t
}

// Data returns the elements of x, which is an argument of the launch or a part of one. The
// stand-in may write them unless the source declares a pointer to const. Request only
// elements that the kernel uses: others may be written by another kernel at the same time.
func Data[T memory.Element](c *Call, x memory.Slice[T]) []T {
	if x.Len() == 0 {
		return nil
	}
	from := uint64(x.Offset())
	to := from + uint64(x.Bytes())
	found, write := false, false
	for _, s := range c.spans {
		if s.from <= from && to <= s.to {
			found, write = true, write || !s.input
		}
	}
	switch {
	case !found || x.Buffer() != nil:
		panic(fmt.Sprintf("kernel: data: %d elements of %s that are not in an argument of the launch", x.Len(), x.DType()))
	case write:
		return UpdateAddress[T](c, from, x.Len())
	}
	return ReadAddress[T](c, from, x.Len())
}

// A span is the memory of an argument: addresses, and whether the source declares a pointer
// to const.
type span struct {
	from, to uint64
	input    bool
}

// spansOf returns the memory of a kernel's arguments whose sizes the launch knows. They are behind the arguments.
func spansOf(d *Def, call *machine.KernelCall, ps []declared) (spans []span) {
	for i, p := range d.Params {
		if p != Pointer {
			continue
		}
		from := call.Bits(i, machine.PtrParam)
		if n := call.Bits(len(d.Params)+i, machine.Int64Param); n > 0 {
			spans = append(spans, span{from, from + n, ps != nil && ps[i].input})
		}
	}
	return spans
}

// checkWrite stops a kernel that writes past the end of an argument, where a GPU may have other
// data of the same allocation, or memory that the source declares const.
func (c *Call) checkWrite(from uint64, bytes int) {
	to, past, input := from+uint64(bytes), uint64(0), false
	for _, s := range c.spans {
		switch {
		case from < s.from || from >= s.to:
		case to > s.to:
			past = max(past, to-s.to)
		case !s.input:
			return
		default:
			input = true
		}
	}
	switch {
	case bytes == 0:
	case input:
		panic(&machine.Trouble{Status: cudadrv.ErrorLaunchFailed, Text: fmt.Sprintf("the Go function of %s asks for %d bytes at %#x to write, and the source declares a pointer to const there: use Read",
			kern.CallOf(c).Name(), bytes, from)})
	case past > 0:
		panic(&machine.Trouble{Status: cudadrv.ErrorIllegalAddress, Text: fmt.Sprintf("the Go function of %s asks for %d bytes at %#x to write, %d past the end of the argument",
			kern.CallOf(c).Name(), bytes, from, past)})
	}
}

// A typed is the part of a Func that does not depend on the type of its arguments.
type typed struct {
	name   string
	fields []field
	err    error // of the type of the arguments
	call   func(c *Call, inputs []bool)

	mu      sync.Mutex                // guards changes of kernels
	kernels atomic.Pointer[[]*Kernel] // of the open modules
}

// add lets the function launch k.
func (t *typed) add(k *Kernel) {
	t.change(func(ks []*Kernel) []*Kernel { return append(ks, k) })
}

// remove removes the kernels of a module.
func (t *typed) remove(m *Module) {
	t.change(func(ks []*Kernel) []*Kernel {
		return slices.DeleteFunc(ks, func(k *Kernel) bool { return k.module == m })
	})
}

func (t *typed) change(fn func([]*Kernel) []*Kernel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ks []*Kernel
	if old := t.kernels.Load(); old != nil {
		ks = slices.Clone(*old)
	}
	ks = fn(ks)
	t.kernels.Store(&ks)
}

// on returns the kernel for a device, or nil.
func (t *typed) on(dev *device.Device) *Kernel {
	ks := t.kernels.Load()
	if ks == nil {
		return nil
	}
	for _, k := range *ks {
		if k.module.dev == dev {
			return k
		}
	}
	return nil
}

const fewArgs = 8

// lists has arrays for more arguments than that, so that a launch allocates none.
var lists = sync.Pool{New: func() any { return new([maxArgs]Arg) }}

func (t *typed) launch(s *stream.Stream, g Grid, args unsafe.Pointer, together bool) error {
	if t == nil {
		return fmt.Errorf("kernel: launch: no function given: use Define")
	}
	if err := gpu.CheckStream("kernel: launch", s, nil); err != nil {
		return err
	}
	k := t.on(s.Device())
	if k == nil {
		return fmt.Errorf("kernel: launch %s on %s: its source is not compiled for the device, or the module is closed: call kernel.Compile first", t.name, s.Device())
	}
	if n := len(t.fields); n <= fewArgs {
		var list [fewArgs]Arg // on the stack, which is faster than the pool
		encode(t.fields, args, list[:n])
		return k.enqueue(s, g, list[:n], together)
	}
	list := lists.Get().(*[maxArgs]Arg)
	encode(t.fields, args, list[:])
	err := k.enqueue(s, g, list[:len(t.fields)], together)
	lists.Put(list)
	return err
}

// enqueue is Launch or LaunchCooperative.
func (k *Kernel) enqueue(s *stream.Stream, g Grid, args []Arg, together bool) error {
	if together {
		return k.LaunchCooperative(s, g, args...)
	}
	return k.launch(s, g, args, false)
}

// compare returns an error if the type of the arguments contradicts the source.
func (t *typed) compare(all map[string][]declared) error {
	err := t.err
	if err == nil {
		err = compareFields(t.fields, all[t.name])
	}
	if err != nil {
		return fmt.Errorf("%s: %w", t.name, err)
	}
	return nil
}

// standIn returns the function that implements the kernel on virtual devices, or nil.
func (t *typed) standIn(ps []declared) func(*Call) {
	if t.call == nil {
		return nil
	}
	inputs := make([]bool, len(ps))
	for i, p := range ps {
		inputs[i] = p.input
	}
	return func(c *Call) { t.call(c, inputs) }
}
