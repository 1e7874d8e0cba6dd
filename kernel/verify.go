package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Trial is one launch that Verify makes.
type Trial struct {
	Kernel string
	Grid   Grid
	// Args has a value for each parameter. A pointer is a slice of the host, such as []float32,
	// or nil. A number is an int32, a float32 and so on. A Struct is its []byte. Verify copies
	// slices and does not change them. Each argument has separate memory.
	Args []any
	// Outputs are the names, in the source, of pointers whose memory the kernel only writes.
	// Verify poisons the memory and makes the launch twice, with different poison. An element
	// that only one side writes is then a difference.
	Outputs []string
	// Scratch are the names of pointers whose memory may differ after the launch.
	Scratch []string
}

// A Tolerance bounds the difference of two numbers: by Abs, plus Rel times the size of the
// kernel's number, or by ULP units in the last place of the type, if that is more.
type Tolerance struct {
	Abs, Rel float64
	ULP      int
}

// VerifyConfig has the options of Verify.
type VerifyConfig struct {
	// Device runs the kernels; nil means the first GPU of device.Default.
	Device *device.Device
	// Host compiles the source with g++ and runs it on the host, with a fiber for each thread
	// of a block, instead of on a GPU. The source must not include CUDA's headers, and blocks
	// must not wait for each other. The compiled program is kept with the compiled kernels (see
	// CHORUS_KERNEL_CACHE). Without g++ the error matches exec.ErrNotFound.
	Host bool
	// Tolerances are for the elements of a type. Elements of other types must have the same
	// bits, or both be NaN. GPUs contract a*b+c to one rounding and have other functions
	// than package math, so floats usually need a tolerance.
	Tolerances map[memory.DType]Tolerance
}

// Verify runs kernels of src with equal arguments as CUDA and as their Go functions, and compares
// all memory afterwards. It is for tests. No trials, or a trial without blocks, are an error. The
// Go functions run on a separate virtual device, which reports illegal accesses. Memory around
// each argument detects writes outside of it. cfg may be nil.
//
// If the results differ, the error is a *VerifyError with the first and the worst difference of
// the first trial that fails. Without a GPU the error says so; then set VerifyConfig.Host.
// Verify returns when all launches have completed, or when ctx has ended.
func Verify(ctx context.Context, src *Source, trials []Trial, cfg *VerifyConfig) error {
	if src == nil {
		return errors.New("kernel: verify: no source given")
	}
	if cfg == nil {
		cfg = &VerifyConfig{}
	}
	v := &verification{cfg: cfg, said: declarations(src.CUDA)}
	err := v.run(ctx, src, trials)
	closed := v.close()
	if err == nil { // after an error the virtual device may be lost
		err = closed
	}
	if err != nil {
		return fmt.Errorf("kernel: verify %s: %w", src.Name, err)
	}
	return nil
}

// run validates all trials before it compiles the source, which takes longer.
func (v *verification) run(ctx context.Context, src *Source, trials []Trial) error {
	if len(trials) == 0 {
		return errors.New("no trials given: want at least one")
	}
	all := make([][]testArg, len(trials))
	for i := range trials {
		var err error
		if b := trials[i].Grid.Blocks; b[0] == 0 || b[1] == 0 || b[2] == 0 {
			return fmt.Errorf("trial %d, %s: a grid of %v blocks launches nothing: want 1 or more in each dimension", i, trials[i].Kernel, b)
		}
		if all[i], err = v.arguments(src, &trials[i]); err != nil {
			return fmt.Errorf("trial %d, %s: %w", i, trials[i].Kernel, err)
		}
	}
	if err := v.open(ctx, src); err != nil {
		return err
	}
	for i := range trials {
		if err := v.trial(ctx, &trials[i], all[i]); err != nil {
			return fmt.Errorf("trial %d, %s: %w", i, trials[i].Kernel, err)
		}
	}
	return nil
}

// A verification runs trials on two sides.
type verification struct {
	cfg        *VerifyConfig
	said       map[string][]declared
	cuda, goes side // the source, and the Go functions
	closers    []func() error
}

// A side runs a kernel and updates the memory of its arguments.
type side interface {
	run(ctx context.Context, kernel string, g Grid, args []testArg) error
	String() string
}

func (v *verification) close() error {
	var errs []error
	for i := len(v.closers) - 1; i >= 0; i-- {
		errs = append(errs, v.closers[i]())
	}
	return errors.Join(errs...)
}

// trial launches the kernel of one trial on both sides and compares the results.
func (v *verification) trial(ctx context.Context, tr *Trial, args []testArg) error {
	poisons := []byte{0xff, 0} // NaN, and 0
	if len(tr.Outputs) == 0 {
		poisons = poisons[:1]
	}
	for _, p := range poisons {
		want, got := memoryOf(args, p), memoryOf(args, p)
		if err := v.goes.run(ctx, tr.Kernel, tr.Grid, got); err != nil {
			return fmt.Errorf("%s: %w", v.goes, err)
		}
		if err := v.cuda.run(ctx, tr.Kernel, tr.Grid, want); err != nil {
			return fmt.Errorf("%s: %w", v.cuda, err)
		}
		if e := v.compare(tr.Kernel, want, got); e != nil {
			return e
		}
	}
	return nil
}

// guard is the number of bytes before and after the memory of an argument. It keeps the
// alignment that the allocator gives.
const guard = 256

// A testArg is the argument of a trial.
type testArg struct {
	name   string // in the source; "" if unknown
	param  Param
	elem   memory.DType // of the number, or of the memory
	value  []byte       // of the number, the struct or the memory
	memory []byte       // of a pointer that is not null, with guards
	output bool
	hidden bool // not compared
}

// arguments converts the arguments of a trial.
func (v *verification) arguments(src *Source, tr *Trial) (args []testArg, err error) {
	at := slices.IndexFunc(src.Kernels, func(d Def) bool { return d.Name == tr.Kernel })
	if at < 0 {
		return nil, fmt.Errorf("the source has no kernel of this name")
	}
	params := src.Kernels[at].Params
	if len(params) != len(tr.Args) {
		return nil, fmt.Errorf("%d arguments: want %d: %v", len(tr.Args), len(params), params)
	}
	for i, p := range params {
		a := testArg{param: p}
		if ps := v.said[tr.Kernel]; ps != nil {
			a.name = ps[i].name
		}
		if err := a.set(tr.Args[i]); err != nil {
			return nil, fmt.Errorf("argument %d: %w", i, err)
		}
		args = append(args, a)
	}
	mark := func(names []string, set func(*testArg)) error {
		for _, name := range names {
			i := slices.IndexFunc(args, func(a testArg) bool { return a.name == name && a.param == Pointer })
			if i < 0 {
				return fmt.Errorf("the source declares no pointer %q: it has %s", name, namesOf(args))
			}
			set(&args[i])
		}
		return nil
	}
	if err := mark(tr.Outputs, func(a *testArg) { a.output = true }); err != nil {
		return nil, err
	}
	return args, mark(tr.Scratch, func(a *testArg) { a.hidden = true })
}

// set sets the value.
func (a *testArg) set(x any) error {
	v := reflect.ValueOf(x)
	if _, ok := a.param.isStruct(); ok {
		if a.value, ok = x.([]byte); !ok {
			return fmt.Errorf("a %T for a %s: want []byte", x, a.param)
		}
		return nil
	}
	if x == nil && a.param == Pointer {
		return nil
	}
	for _, t := range fieldTypes {
		switch {
		case x == nil:
		case v.Type() == t.number && a.param == numberParams[t.elem]:
			number := reflect.New(v.Type())
			number.Elem().Set(v)
			a.elem, a.value = t.elem, slices.Clone(unsafe.Slice((*byte)(number.UnsafePointer()), t.elem.Size()))
			return nil
		case v.Type() == t.host && a.param == Pointer:
			a.elem, a.value = t.elem, unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*t.elem.Size())
			a.memory = []byte{}
			return nil
		}
	}
	return fmt.Errorf("a %T for %s: want a slice such as []float32, a number such as int32 of the parameter's size, or nil for a null pointer", x, withArticle(a.param))
}

func namesOf(args []testArg) string {
	var names []string
	for _, a := range args {
		names = append(names, a.name)
	}
	return strings.Join(names, ", ")
}

// memoryOf returns the arguments with memory for one side, where outputs are poisoned.
func memoryOf(args []testArg, poison byte) []testArg {
	args = slices.Clone(args)
	for i := range args {
		a := &args[i]
		if a.memory == nil {
			continue
		}
		a.memory = slices.Concat(guardBytes[:], a.value, guardBytes[:])
		if a.output {
			copy(a.data(), bytes.Repeat([]byte{poison}, len(a.value)))
		}
	}
	return args
}

// data returns the memory between the guards.
func (a *testArg) data() []byte { return a.memory[guard : len(a.memory)-guard] }

// guardBytes are contents that a kernel hardly writes.
var guardBytes = func() (b [guard]byte) {
	for i := range b {
		b[i] = byte(37*i + 101)
	}
	return b
}()

// A Difference is an element that a kernel and its Go function leave different, or an element
// outside of an argument that one of them writes.
type Difference struct {
	Arg   int    // number of the argument
	Name  string // of the parameter in the source; "" if unknown
	Index int    // in elements
	// Outside is set if the element is before or after the argument. A side that did not write
	// it has the value "untouched".
	Outside      bool
	CUDA, Go     string  // the values
	Error, Bound float64 // the size of the difference, and the largest allowed size
}

// text describes the difference.
func (d *Difference) text() string {
	name := d.Name
	if name == "" {
		name = fmt.Sprint("argument ", d.Arg)
	}
	if d.Outside {
		return fmt.Sprintf("%s[%d], outside of the argument, is %s in CUDA and %s in Go", name, d.Index, d.CUDA, d.Go)
	}
	return fmt.Sprintf("%s[%d] is %s in CUDA and %s in Go: the error is %.3g: at most %.3g", name, d.Index, d.CUDA, d.Go, d.Error, d.Bound)
}

const untouched = "untouched"

// A VerifyError says that a kernel and its Go function differ.
type VerifyError struct {
	Kernel       string
	CUDA         string // what ran the kernel: a GPU, or the host
	Count        int    // differences in all arguments
	First, Worst Difference
}

func (e *VerifyError) Error() string {
	text := fmt.Sprintf("%s and the Go function of %s differ in %d elements; the first: %s", e.CUDA, e.Kernel, e.Count, e.First.text())
	if e.Worst != e.First {
		text += "; the worst: " + e.Worst.text()
	}
	return text
}

// compare compares the memory of both sides, and returns nil if they agree.
func (v *verification) compare(kernel string, cuda, goes []testArg) error {
	e := &VerifyError{Kernel: kernel, CUDA: v.cuda.String()}
	for i := range cuda {
		a, b := &cuda[i], &goes[i]
		if a.memory == nil {
			continue
		}
		n := len(a.value) / a.elem.Size()
		beside := guard / a.elem.Size()
		for at := -beside; at < n+beside; at++ {
			d := Difference{Arg: i, Name: a.name, Index: at, Outside: at < 0 || at >= n}
			differs := false
			if d.Outside {
				differs = d.compareGuards(a, b)
			} else if !a.hidden {
				differs = d.compareElements(a, b, v.cfg.Tolerances)
			}
			if differs {
				e.add(d)
			}
		}
	}
	if e.Count == 0 {
		return nil
	}
	return e
}

func (e *VerifyError) add(d Difference) {
	if e.Count++; e.Count == 1 {
		e.First, e.Worst = d, d
	}
	if d.excess() > e.Worst.excess() {
		e.Worst = d
	}
}

// excess orders differences by how much they exceed their bounds.
func (d *Difference) excess() float64 {
	if d.Outside {
		return math.Inf(1)
	}
	return d.Error / max(d.Bound, 1e-300)
}

// elementAt returns the bytes of an element, which may be outside of the argument.
func (a *testArg) elementAt(i int) []byte {
	size := a.elem.Size()
	return a.memory[guard+i*size:][:size]
}

// compareGuards reports whether a side has written outside of an argument.
func (d *Difference) compareGuards(a, b *testArg) bool {
	size := a.elem.Size()
	at := d.Index * size
	if at < 0 {
		at += guard
	} else {
		at -= len(a.value)
	}
	want := string(guardBytes[at:][:size])
	of := func(a *testArg) string {
		x := a.elementAt(d.Index)
		if string(x) == want {
			return untouched
		}
		return textOf(a.elem, x)
	}
	d.CUDA, d.Go = of(a), of(b)
	return d.CUDA != untouched || d.Go != untouched
}

// compareElements reports whether an element differs by more than its bound.
func (d *Difference) compareElements(a, b *testArg, tolerances map[memory.DType]Tolerance) bool {
	x, y := a.elementAt(d.Index), b.elementAt(d.Index)
	if string(x) == string(y) {
		return false
	}
	float := dtype.Of(a.elem).IsFloat()
	v, w := dtype.Of(a.elem).Load(x, 0), dtype.Of(a.elem).Load(y, 0)
	f, g := v.Float64(), w.Float64()
	if math.IsNaN(f) && math.IsNaN(g) {
		return false
	}
	d.CUDA, d.Go = textOf(a.elem, x), textOf(a.elem, y)
	d.Error = math.Abs(f - g)
	if !float {
		d.Error = max(d.Error, 1) // different integers may be the same float64
	}
	if math.IsNaN(d.Error) {
		d.Error = math.Inf(1)
	}
	tol, given := tolerances[a.elem]
	if !given {
		return true
	}
	d.Bound = tol.Abs + tol.Rel*math.Abs(f)
	if tol.ULP > 0 {
		d.Bound = max(d.Bound, float64(tol.ULP)*ulp(a.elem, f))
	}
	return math.IsInf(d.Error, 1) || !(d.Error <= d.Bound)
}

// textOf returns the value of an element.
func textOf(t memory.DType, b []byte) string {
	v := dtype.Of(t).Load(b, 0)
	switch {
	case t == memory.Float64:
		return strconv.FormatFloat(v.Float64(), 'g', -1, 64)
	case dtype.Of(t).IsFloat():
		return strconv.FormatFloat(float64(v.Float32()), 'g', -1, 32)
	case t == memory.Uint64:
		return strconv.FormatUint(uint64(v.Int64()), 10)
	}
	return strconv.FormatInt(v.Int64(), 10)
}

// ulp returns the distance of x to the next number of its type; of an integer, 1.
func ulp(t memory.DType, x float64) float64 {
	row := dtype.Of(t)
	if !row.IsFloat() {
		return 1
	}
	exponent := row.MinExp
	if x != 0 {
		exponent = max(exponent, math.Ilogb(x))
	}
	return math.Ldexp(1, exponent-(row.Digits-1))
}

// open compiles the source for both sides.
func (v *verification) open(ctx context.Context, src *Source) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	v.closers = append(v.closers, sys.Close)
	if v.goes, err = v.openDevice(sys.Devices()[0], src, "the Go function"); err != nil {
		return err
	}
	if v.cfg.Host {
		v.cuda, err = v.openHost(ctx, src)
		return err
	}
	dev := v.cfg.Device
	if dev == nil {
		sys, err := device.Default()
		if err != nil {
			return fmt.Errorf("there is no GPU: set VerifyConfig.Host to run the source on the host: %w", err)
		}
		dev = sys.Devices()[0]
	}
	if backend := dev.System().Backend(); backend != "cuda" {
		return fmt.Errorf("%s is not a GPU, its backend is %s: set VerifyConfig.Host to run the source on the host", dev, backend)
	}
	v.cuda, err = v.openDevice(dev, src, "CUDA on "+dev.String())
	return err
}

// A deviceSide runs the kernels of a module.
type deviceSide struct {
	name string
	s    *stream.Stream
	m    *Module
}

func (v *verification) openDevice(dev *device.Device, src *Source, name string) (*deviceSide, error) {
	s, err := stream.New(dev, nil)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, s.Close)
	alone := *src
	inside.GoOnly(&alone) // Verify compares it itself
	m, err := Compile(dev, &alone)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, m.Close)
	return &deviceSide{name, s, m}, nil
}

func (d *deviceSide) String() string { return d.name }

func (d *deviceSide) run(ctx context.Context, kernel string, g Grid, args []testArg) (err error) {
	k, err := d.m.Kernel(kernel)
	if err != nil {
		return err
	}
	memories := make([]memory.Slice[byte], len(args))
	defer func() {
		for _, x := range memories {
			err = errors.Join(err, x.Close())
		}
	}()
	list := make([]Arg, len(args))
	for i := range args {
		if args[i].memory != nil {
			if memories[i], err = memory.MakeFrom(d.s, args[i].memory); err != nil {
				return err
			}
		}
		list[i] = args[i].arg(memories[i])
	}
	if err := k.Launch(d.s, g, list...); err != nil {
		return err
	}
	if err := d.s.Sync(ctx); err != nil {
		return errors.Join(err, d.reports())
	}
	for i, x := range memories {
		if err := x.CopyTo(d.s, args[i].memory); err != nil {
			return err
		}
	}
	return d.reports()
}

// arg returns the argument of a launch, which points to x if the argument is a
// pointer that is not null.
func (a *testArg) arg(x memory.Slice[byte]) Arg {
	if _, ok := a.param.isStruct(); ok {
		return Bytes(a.value)
	}
	if a.memory != nil {
		return Arg{kind: Pointer, elem: a.elem, bits: x.Ptr() + guard, argDevice: inside.ArgOn(x.Device(), len(a.value))}
	}
	bits := uint64(0)
	for i, b := range a.value {
		bits |= uint64(b) << (8 * i)
	}
	return Arg{kind: a.param, bits: bits}
}

// reports returns the mistakes that virtual devices have found.
func (d *deviceSide) reports() error {
	var errs []error
	for _, r := range d.s.Device().System().Reports() {
		errs = append(errs, errors.New(r))
	}
	return errors.Join(errs...)
}

// A hostSide runs the source on the host.
type hostSide struct{ p *cudacc.HostProgram }

func (v *verification) openHost(ctx context.Context, src *Source) (*hostSide, error) {
	key, err := hostKey(src)
	if err != nil {
		return nil, err
	}
	p, err := compileForHost(ctx, key, src)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, p.Close)
	return &hostSide{p}, nil
}

func (h *hostSide) String() string { return "the source on the host" }

func (h *hostSide) run(ctx context.Context, kernel string, g Grid, args []testArg) error {
	var list []cudacc.HostArg
	for _, a := range args {
		switch {
		case a.memory != nil:
			list = append(list, cudacc.HostArg{Memory: a.memory, Before: guard})
		case a.param == Pointer:
			list = append(list, cudacc.HostArg{Null: true})
		default:
			list = append(list, cudacc.HostArg{Value: a.value})
		}
	}
	return h.p.Run(ctx, kernel, g.Blocks, g.Threads, g.SharedBytes, list)
}
