package kernel

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Func launches a kernel of a Source with arguments of type A. Define returns one. It may be
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

// spansOf returns the memory of a kernel's arguments whose sizes the launch
// knows; the sizes follow the arguments.
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
			inside.CallOf(c).Name(), bytes, from)})
	case past > 0:
		panic(&machine.Trouble{Status: cudadrv.ErrorIllegalAddress, Text: fmt.Sprintf("the Go function of %s asks for %d bytes at %#x to write, %d past the end of the argument",
			inside.CallOf(c).Name(), bytes, from, past)})
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

// A Grid is the shape of a launch: blocks, threads in a block, and bytes of
// dynamic shared memory.
type Grid struct {
	Blocks, Threads [3]uint32
	SharedBytes     uint32
}

// Cover returns a grid of at least n threads in one dimension, 256 to a block.
func Cover(n int) Grid {
	blocks := min((max(n, 0)+255)/256, math.MaxUint32) // a launch refuses it
	return Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{256, 1, 1}}
}

// A Kernel is one function of a Module.
type Kernel struct {
	module *Module
	name   string
	h      cudadrv.Function
	params []Param
	source []declared // the type that the source declares for each parameter; nil if unknown
	typed  bool       // the function that replaces it gets the number of bytes of each argument
	attrs  Attributes

	mu     sync.Mutex    // guards raising shared
	shared atomic.Uint32 // bytes of dynamic shared memory that the driver allows now
}

// maxArgs bounds the parameters of a kernel, so that a launch allocates
// nothing.
const maxArgs = 32

// frame holds the argument values of a launch and their addresses, the form that CUDA
// needs. The stand-in of a Func gets the bytes of each argument, too. usesOf finds the frame
// from ptrs.
type frame struct {
	ptrs  [2 * maxArgs]unsafe.Pointer
	vals  [2 * maxArgs]uint64
	bytes [maxArgs]uint64 // of the memory at pointers
}

var frames = sync.Pool{New: func() any {
	f := new(frame)
	for i := range f.vals {
		f.ptrs[i] = unsafe.Pointer(&f.vals[i])
	}
	return f
}}

// Launch enqueues the kernel on s (cuLaunchKernel) and returns at once; the arguments have
// been copied by then. Launch validates the number and types of the arguments, that
// pointers are on the stream's device, and that the device has room for the grid's blocks. Pointers
// to vectors, such as float4, must be aligned to them.
// A kernel may use more than 48 KiB of dynamic shared memory without further preparation.
// A grid without blocks launches nothing.
func (k *Kernel) Launch(s *stream.Stream, g Grid, args ...Arg) error {
	return k.launch(s, g, args, false)
}

// LaunchCooperative is Launch for a kernel whose blocks wait for each other
// (cuLaunchCooperativeKernel): all blocks are on the device at once. If the grid is too
// large for that, nothing is enqueued, and the error says how many blocks fit and matches
// device.ErrorCooperativeLaunchTooLarge.
func (k *Kernel) LaunchCooperative(s *stream.Stream, g Grid, args ...Arg) error {
	if k != nil && k.module != nil && !k.module.limits.cooperative {
		return &device.UnsupportedError{Feature: "kernel: cooperative launch", Need: "a device that has it", Have: k.module.dev.String()}
	}
	return k.launch(s, g, args, true)
}

func (k *Kernel) launch(s *stream.Stream, g Grid, args []Arg, together bool) error {
	if err := k.check(s, args); err != nil {
		return err
	}
	if g.Blocks[0] == 0 || g.Blocks[1] == 0 || g.Blocks[2] == 0 {
		return nil
	}
	if err := k.fit(g); err != nil {
		return fmt.Errorf("kernel: launch %s on %s: %w", k.name, k.module.dev, err)
	}
	if gpu.AnyCapture() && !k.module.forever {
		if err := gpu.StreamOf(s).Captured((*heldModule)(k.module)); err != nil {
			return fmt.Errorf("kernel: launch %s: %w", k.name, err)
		}
	}
	f := frames.Get().(*frame)
	for i := range args {
		f.vals[i] = args[i].bits // little-endian: a narrower value is the first bytes
		f.bytes[i] = inside.ArgBytesOf(&args[i])
		if b := args[i].bytes; b != nil {
			f.ptrs[i] = unsafe.Pointer(b)
		}
		if k.typed {
			f.vals[len(args)+i] = f.bytes[i]
		}
	}
	err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		if together {
			return drv.LaunchCooperativeKernel(k.h, g.Blocks, g.Threads, g.SharedBytes, gpu.StreamOf(s).Raw(), unsafe.Pointer(&f.ptrs))
		}
		return drv.LaunchKernel(k.h, g.Blocks, g.Threads, g.SharedBytes, gpu.StreamOf(s).Raw(), unsafe.Pointer(&f.ptrs))
	})
	for i := range args {
		if args[i].bytes != nil {
			f.ptrs[i] = unsafe.Pointer(&f.vals[i])
		}
	}
	frames.Put(f)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, device.ErrorCooperativeLaunchTooLarge):
		return k.tooLarge(g, err)
	}
	return fmt.Errorf("kernel: launch %s: %w", k.name, err)
}

func (k *Kernel) check(s *stream.Stream, args []Arg) error {
	if k == nil || k.module == nil {
		return errors.New("kernel: launch: no kernel given")
	}
	if k.module.owner.Closed() {
		return fmt.Errorf("kernel: launch %s: module: %w", k.name, device.ErrClosed)
	}
	if err := gpu.CheckStream("kernel: launch", s, gpu.DeviceOf(k.module.dev)); err != nil {
		return err
	}
	if len(args) != len(k.params) {
		return fmt.Errorf("kernel: launch %s: %d arguments: want %d: %v", k.name, len(args), len(k.params), k.params)
	}
	for i := range args {
		a := &args[i]
		switch {
		case a.err != nil:
			return fmt.Errorf("kernel: launch %s: argument %d: %w", k.name, i, a.err)
		case a.kind != k.params[i]:
			return fmt.Errorf("kernel: launch %s: argument %d is %s: want %s", k.name, i, withArticle(a.kind), withArticle(k.params[i]))
		case k.source != nil && !k.source[i].takes(a.elem):
			return fmt.Errorf("kernel: launch %s: argument %d is memory of %s, but the source declares %q", k.name, i, a.elem, k.source[i].text)
		case k.source != nil && k.source[i].align > 0 && a.bits%uint64(k.source[i].align) != 0:
			return fmt.Errorf("kernel: launch %s: argument %d is at %#x, but the source declares %q: want a multiple of %d bytes",
				k.name, i, a.bits, k.source[i].text, k.source[i].align)
		case inside.ArgDeviceOf(a) != nil && inside.ArgDeviceOf(a) != k.module.dev:
			return fmt.Errorf("kernel: launch %s on %s: argument %d is memory of %s", k.name, k.module.dev, i, inside.ArgDeviceOf(a))
		}
	}
	return nil
}

// The limits of CUDA on every device, in x, y and z.
var (
	maxBlocks  = [3]uint32{math.MaxInt32, math.MaxUint16, math.MaxUint16}
	maxThreads = [3]uint32{1024, 1024, 64}
)

// fit validates that a block of the grid fits on the device.
func (k *Kernel) fit(g Grid) error {
	threads := uint64(1)
	for i, axis := range [3]string{"x", "y", "z"} {
		switch {
		case g.Blocks[i] > maxBlocks[i]:
			return fmt.Errorf("%d blocks in %s: at most %d", g.Blocks[i], axis, maxBlocks[i])
		case g.Threads[i] == 0:
			return fmt.Errorf("no threads in %s: want 1 or more", axis)
		case g.Threads[i] > maxThreads[i]:
			return fmt.Errorf("%d threads of a block in %s: at most %d", g.Threads[i], axis, maxThreads[i])
		}
		threads *= uint64(g.Threads[i])
	}
	if threads > uint64(k.attrs.MaxThreads) {
		return fmt.Errorf("%d threads of a block: at most %d of this kernel, which uses %d registers a thread",
			threads, k.attrs.MaxThreads, k.attrs.Registers)
	}
	if g.SharedBytes > k.shared.Load() {
		return k.allowShared(g.SharedBytes)
	}
	return nil
}

// allowShared permits blocks the device's maximum of dynamic shared memory, once per
// kernel. It has no cost for launches that use less.
func (k *Kernel) allowShared(bytes uint32) error {
	most := k.attrs.MaxDynamicSharedBytes
	if int64(bytes) > int64(most) {
		return fmt.Errorf("%d bytes of dynamic shared memory: a block has at most %d beside the %d that the kernel declares",
			bytes, most, k.attrs.SharedBytes)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if bytes <= k.shared.Load() {
		return nil
	}
	err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.FuncSetAttribute(k.h, cudadrv.FuncMaxDynamicSharedBytes, int32(most))
	})
	if err == nil {
		k.shared.Store(uint32(most))
	}
	return err
}
