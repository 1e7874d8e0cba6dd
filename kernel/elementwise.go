package kernel

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// ElementwiseConfig are the options of NewElementwise.
type ElementwiseConfig struct {
	// Inputs names the variables of the code, which is then an expression instead of a function.
	Inputs []string
	// Defaults has the parameters that are the same for all elements, each by a Set with
	// its default value. A launch may set another value.
	Defaults []Operand
	// Floats and Ints implement the code on virtual devices, for computations in floats,
	// and in integers or bool. in has a value for each parameter of the function that is
	// not an output, in their order; the function stores one value for each output in out.
	// The values have the type of the computation, and out is rounded to it; a uint64 is
	// passed as its bits, a bool as 0 or 1.
	Floats func(in, out []float64)
	Ints   func(in, out []int64)
}

// An Elementwise is a function of single elements, written in CUDA C++. It becomes a
// kernel for the types of each launch. It mirrors torch.cuda.jiterator. It may be used by
// several goroutines.
type Elementwise struct {
	owner    handle.Owner
	code     string
	sig      *signature
	cfg      ElementwiseConfig
	inputs   []string  // names of the inputs
	outputs  int       // number of outputs
	defaults []Operand // for each parameter of the function with a default

	mu      sync.RWMutex
	kernels map[variant]*Kernel
	modules []*Module
}

const (
	mostInputs  = 8
	mostOutputs = 8
)

// A variant identifies a compiled kernel: the role and type of each parameter.
type variant struct {
	dev  *device.Device
	args [maxArgs]struct {
		role  role
		dtype memory.DType
	}
}

// NewElementwise returns an element-wise function. The last function template in
// the code has one type parameter,
//
//	template <typename T> T axpy(T x, T y, T a) { return a * x + y; }
//
// with one result, or with outputs T& and no result,
//
//	template <typename T> void split(T x, T& whole, T& rest) { ... }
//
// Alternatively the code is an expression of the names in
// ElementwiseConfig.Inputs. There may be 8 inputs and 8 outputs. NewElementwise
// compiles nothing, so an error in the code is a *CompileError of Launch, with
// the line of the code.
func NewElementwise(code string, cfg *ElementwiseConfig) (*Elementwise, error) {
	e := &Elementwise{code: code, kernels: map[variant]*Kernel{}}
	e.cfg = *cmp.Or(cfg, new(ElementwiseConfig))
	if len(e.cfg.Inputs) > 0 {
		var err error
		if e.code, err = expression(code, &e.cfg); err != nil {
			return nil, fmt.Errorf("kernel: new element-wise function: %w", err)
		}
	}
	if err := e.read(); err != nil {
		return nil, fmt.Errorf("kernel: new element-wise function: %w", err)
	}
	handle.Init(e, &e.owner, handle.About{Kind: "element-wise function"})
	return e, nil
}

var identifier = regexp.MustCompile(`^[A-Za-z_]\w*$`)

// expression returns the source of a function that computes an expression.
func expression(code string, cfg *ElementwiseConfig) (string, error) {
	params := slices.Clone(cfg.Inputs)
	for _, d := range cfg.Defaults {
		params = append(params, d.name)
	}
	for i, p := range params {
		if !identifier.MatchString(p) || slices.Contains(params[:i], p) {
			return "", fmt.Errorf("%q is not a name of an input or parameter, or occurs twice", p)
		}
	}
	return "template <typename T> T expression(T " + strings.Join(params, ", T ") + ") { return " + code + "\n; }", nil
}

// read parses the code and determines the parameters.
func (e *Elementwise) read() (err error) {
	if e.sig, err = parse(e.code); err != nil {
		return err
	}
	all := e.sig.named(input)
	e.defaults = make([]Operand, len(e.sig.params))
	for _, d := range e.cfg.Defaults {
		i := slices.IndexFunc(e.sig.params, func(p parameter) bool { return p.name == d.name })
		if d.role != scalar || i < 0 || e.sig.params[i].role == output {
			return fmt.Errorf("a default for %q: %s has the parameters %s", d.name, e.sig.name, strings.Join(all, ", "))
		}
		if e.sig.params[i].role == scalar {
			return fmt.Errorf("two defaults for %q", d.name)
		}
		e.sig.params[i].role = scalar
		e.defaults[i] = d
	}
	e.inputs, e.outputs = e.sig.named(input), e.sig.outputs()
	in, given := len(e.inputs), len(e.cfg.Defaults)
	switch {
	case in == 0 || in > mostInputs || e.outputs > mostOutputs:
		return fmt.Errorf("%s has %d inputs and %d outputs: want 1 to %d, and at most %d", e.sig.name, in, e.outputs, mostInputs, mostOutputs)
	case in+e.outputs+given+2 > maxArgs:
		return fmt.Errorf("%s has %d parameters with defaults: at most %d beside %d inputs and %d outputs",
			e.sig.name, given, maxArgs-2-in-e.outputs, in, e.outputs)
	}
	return nil
}

// Close unloads the kernels, whose launches must have completed. While a graph has one of them,
// Close returns an error and all stay loaded. It is idempotent.
func (e *Elementwise) Close() error {
	if e == nil || e.owner.Closed() {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range e.modules {
		if err := m.inUse("kernel: close the element-wise kernel"); err != nil {
			return err
		}
	}
	if !e.owner.Close() {
		return nil
	}
	var errs []error
	for _, m := range e.modules {
		errs = append(errs, m.Close())
	}
	e.modules = nil
	return errors.Join(errs...)
}

// kernel returns the kernel for a variant, which the first call compiles.
func (e *Elementwise) kernel(v *variant, common memory.DType) (*Kernel, error) {
	e.mu.RLock()
	k := e.kernels[*v]
	e.mu.RUnlock()
	if k != nil {
		return k, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if k := e.kernels[*v]; k != nil {
		return k, nil
	}
	if e.owner.Closed() {
		return nil, device.ErrClosed
	}
	return e.build(*v, common)
}

// build compiles the kernel for a variant, and on virtual devices also creates
// its Go function. e.mu is held.
func (e *Elementwise) build(v variant, common memory.DType) (*Kernel, error) {
	def := Def{Name: elementwiseKernel, Params: []Param{U64, U32}}
	for _, a := range v.args[:e.arity()] {
		def.Params = append(def.Params, paramOf(a.role, a.dtype))
	}
	if gpu.DeviceOf(v.dev).System().Machine != nil {
		stand, err := e.standIn(&v, common)
		if err != nil {
			return nil, err
		}
		def.Go = stand
	}
	src := &Source{Name: e.sig.name + ".cu", CUDA: e.source(&v, common),
		Options: []string{"--device-as-default-execution-space"}, Kernels: []Def{def}}
	inside.GoOnly(src)
	m, err := Compile(v.dev, src)
	if err != nil {
		return nil, err
	}
	e.modules = append(e.modules, m)
	e.kernels[v] = m.kernels[elementwiseKernel]
	return e.kernels[v], nil
}

// arity returns the number of parameters and results of the function.
func (e *Elementwise) arity() int {
	if e.sig.byReturn {
		return len(e.sig.params) + 1 // the result comes last
	}
	return len(e.sig.params)
}

// roleOf returns the role of a parameter of the kernel.
func (e *Elementwise) roleOf(i int) role {
	if i == len(e.sig.params) {
		return output
	}
	return e.sig.params[i].role
}

func paramOf(r role, t memory.DType) Param {
	switch {
	case r == input || r == output:
		return Pointer
	case t == memory.Float64:
		return F64
	}
	return I64
}

// Launch enqueues the function for all elements on s and returns at once, except for the
// first launch with these types, which compiles the kernel. Inputs and outputs are given
// like the function's parameters. All slices have the same length; inputs may
// also have a single element. The type of the computation is torch's promotion of the
// input types, with float for the 16-bit floats. Results are rounded to the promoted type
// and then to the type of the output, which must not be of a lower category. The launch
// allocates nothing.
func (e *Elementwise) Launch(s *stream.Stream, operands ...Operand) error {
	if e == nil || e.sig == nil {
		return errors.New("kernel: launch: no element-wise function given")
	}
	if err := e.launch(s, operands); err != nil {
		return fmt.Errorf("kernel: launch %s: %w", e.sig.name, err)
	}
	return nil
}

func (e *Elementwise) launch(s *stream.Stream, operands []Operand) error {
	if e.owner.Closed() {
		return device.ErrClosed
	}
	if err := gpu.CheckStream("kernel: launch", s, nil); err != nil {
		return err
	}
	l := job{v: variant{dev: s.Device()}}
	if err := e.prepare(&l, operands); err != nil {
		return err
	}
	if l.n == 0 {
		return nil
	}
	k, err := e.kernel(&l.v, l.common)
	if err != nil {
		return err
	}
	perBlock := elementwiseBlock * itemsOf(l.widest)
	blocks := (l.n-1)/perBlock + 1
	if blocks > int(maxBlocks[0]) {
		return fmt.Errorf("%d elements: at most %d", l.n, int(maxBlocks[0])*perBlock)
	}
	grid := Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{elementwiseBlock, 1, 1}}
	return k.Launch(s, grid, l.args[:e.arity()+2]...)
}

// A job is a launch during validation.
type job struct {
	v      variant
	common memory.DType // of the computation
	n      int          // elements
	widest int          // size of the widest element in bytes
	given  [maxArgs]int8
	args   [maxArgs]Arg
}

// prepare validates the operands and converts them to the kernel's arguments.
func (e *Elementwise) prepare(l *job, operands []Operand) error {
	if err := e.match(l, operands); err != nil {
		return err
	}
	if err := l.check(operands); err != nil {
		return err
	}
	if err := l.promote(operands); err != nil {
		return err
	}
	ones := uint32(0)
	l.widest = 1
	for i := range e.arity() {
		o := e.operand(l, operands, i)
		l.v.args[i].role, l.v.args[i].dtype = o.role, o.dtype
		if o.role == number || o.role == scalar {
			l.args[i+2] = o.arg()
			continue
		}
		l.args[i+2] = Arg{kind: Pointer, bits: o.raw, argDevice: inside.ArgOn(o.dev, o.n*o.dtype.Size())}
		l.widest = max(l.widest, o.dtype.Size())
		if o.role == input && o.n == 1 {
			ones |= 1 << i
		}
	}
	l.args[0], l.args[1] = Scalar(uint64(l.n)), Scalar(ones)
	return nil
}

// operand returns the operand given for a parameter of the kernel, or its default.
func (e *Elementwise) operand(l *job, operands []Operand, i int) *Operand {
	if at := l.given[i]; at > 0 {
		return &operands[at-1]
	}
	return &e.defaults[i]
}

// match finds the operand of each parameter.
func (e *Elementwise) match(l *job, operands []Operand) error {
	if len(operands) > maxArgs {
		return fmt.Errorf("%d operands: at most %d", len(operands), maxArgs)
	}
	in, out := 0, 0
	for i := range operands {
		switch o := &operands[i]; o.role {
		case scalar:
			at := e.named(o.name)
			if at < 0 {
				return fmt.Errorf("there is no parameter %q with a default: there are %q", o.name, e.sig.named(scalar))
			}
			if l.given[at] > 0 {
				return fmt.Errorf("the parameter %q is set twice", o.name)
			}
			l.given[at] = int8(i + 1)
		case output:
			e.place(l, i, output, out)
			out++
		default:
			e.place(l, i, input, in)
			in++
		}
	}
	switch {
	case in != len(e.inputs):
		return fmt.Errorf("%d inputs: want %d: %s", in, len(e.inputs), strings.Join(e.inputs, ", "))
	case out != e.outputs:
		return fmt.Errorf("%d outputs: want %d", out, e.outputs)
	}
	return nil
}

// named returns the index of a parameter with a default.
func (e *Elementwise) named(name string) int {
	for i, p := range e.sig.params {
		if p.role == scalar && p.name == name {
			return i
		}
	}
	return -1
}

// place assigns the nth input or output, which is operand at, to its parameter of the
// function.
func (e *Elementwise) place(l *job, at int, r role, n int) {
	for i := range e.arity() {
		if e.roleOf(i) != r {
			continue
		}
		if n == 0 {
			l.given[i] = int8(at + 1)
			return
		}
		n--
	}
}

// check validates the lengths and devices of the slices.
func (l *job) check(operands []Operand) error {
	l.n = -1
	for i := range operands {
		o := &operands[i]
		if o.role != input && o.role != output {
			continue
		}
		switch {
		case o.err != nil:
			return o.err
		case o.dev != nil && o.dev != l.v.dev:
			return fmt.Errorf("operand %d is memory of %s, the stream is of %s", i, o.dev, l.v.dev)
		case dtype.Of(o.dtype).IsFloat8():
			return fmt.Errorf("operand %d is of %s, in which nothing is computed", i, o.dtype)
		case o.role == output && l.n >= 0 && o.n != l.n:
			return fmt.Errorf("operand %d has %d elements, the first output %d", i, o.n, l.n)
		case o.role == output:
			l.n = o.n
		}
	}
	for i := range operands {
		o := &operands[i]
		if o.role == input && o.n != l.n && o.n != 1 {
			return fmt.Errorf("operand %d has %d elements, the output %d: want as many, or 1", i, o.n, l.n)
		}
		for j := range operands {
			if p := &operands[j]; p.role == output && i != j && o.overlaps(p) {
				return fmt.Errorf("operand %d overlaps the output that is operand %d: want the same slice or another", i, j)
			}
		}
	}
	return nil
}

// overlaps reports whether writing p corrupts o: they share memory and are not an input
// and an output with the same elements.
func (o *Operand) overlaps(p *Operand) bool {
	if o.role != input && o.role != output || o.n == 0 || p.n == 0 {
		return false
	}
	size, other := uint64(o.n*o.dtype.Size()), uint64(p.n*p.dtype.Size())
	if o.raw+size <= p.raw || p.raw+other <= o.raw {
		return false
	}
	return o.role == output || o.raw != p.raw || o.dtype.Size() != p.dtype.Size() || o.n != p.n
}

// promote determines the type of the computation.
func (l *job) promote(operands []Operand) error {
	arrays, numbers := memory.Invalid, memory.Invalid
	var err error
	for i := range operands {
		o := &operands[i]
		switch o.role {
		case input:
			if arrays, err = Promote(arrays, o.dtype); err != nil {
				return err
			}
		case number:
			if numbers, err = Promote(numbers, o.dtype); err != nil {
				return err
			}
		}
	}
	if l.common, err = resultType(arrays, numbers); err != nil {
		return err
	}
	for i := range operands {
		if o := &operands[i]; o.role == output && !CanCast(l.common, o.dtype) {
			return fmt.Errorf("the result is of %s and cannot be cast to the %s of operand %d", l.common, o.dtype, i)
		}
	}
	return nil
}

// itemsOf returns how many elements a thread computes: enough loads in flight to saturate
// the memory.
func itemsOf(widest int) int { return max(4, 8/widest) }

// The name of the kernel and the number of threads in its blocks.
const (
	elementwiseKernel = "chorus_elementwise"
	elementwiseBlock  = 256
)

// elementwiseHead defines the conversions between the types.
//
//go:embed elementwise.cuh
var elementwiseHead string

// cType returns the name of a type in elementwise.cuh.
func cType(t memory.DType) string {
	if row := dtype.Of(t); row.Format != nil {
		return "chorus::" + row.Short
	}
	return dtype.Of(t).C
}

// computeType returns the type that the function is called with.
func computeType(common memory.DType) memory.DType {
	if common == memory.Float16 || common == memory.BFloat16 {
		return memory.Float32
	}
	return common
}

// source writes the kernel for a variant. A thread loads the inputs of all its elements
// before it computes the first one, so that the loads overlap.
func (e *Elementwise) source(v *variant, common memory.DType) string {
	x := statements{widest: 1}
	for i := range e.arity() {
		x.add(i, v.args[i].role, v.args[i].dtype, i < len(e.sig.params))
	}
	result := ""
	if e.sig.byReturn {
		result = fmt.Sprintf("r%d = ", len(e.sig.params))
	}
	call := fmt.Sprintf("::%s<compute>(%s);", e.sig.name, strings.Join(x.args, ", "))
	body := strings.NewReplacer("COMMON", cType(common), "COMPUTE", cType(computeType(common)),
		"THREADS", fmt.Sprint(elementwiseBlock), "ITEMS", fmt.Sprint(itemsOf(x.widest)), "KERNEL", elementwiseKernel,
		"PARAMS", x.params.String(), "ARRAYS", x.arrays.String(), "LOAD", x.load.String(),
		"CALL", x.locals.String()+"\t\t\t"+result+call+"\n"+x.store.String()).Replace(elementwiseBody)
	return elementwiseHead + "#line 1 \"" + e.sig.name + ".cu\"\n" + e.code + "\n" + body
}

// statements are the parts of a kernel that depend on the parameters.
type statements struct {
	params, arrays, load, locals, store strings.Builder
	args                                []string // of the call of the function
	widest                              int      // bytes of the widest element
}

// add adds parameter i, which is the result if it is an output that is not
// passed.
func (x *statements) add(i int, r role, t memory.DType, passed bool) {
	switch r {
	case input:
		fmt.Fprintf(&x.params, ", const %s* p%d", cType(t), i)
		fmt.Fprintf(&x.arrays, "\t\tcompute a%d[items];\n", i)
		fmt.Fprintf(&x.load, "\t\t\ta%d[k] = chorus::load<common, compute>(p%[1]d[ones >> %[1]d & 1 ? 0 : i]);\n", i)
		x.args = append(x.args, fmt.Sprintf("a%d[k]", i))
		x.widest = max(x.widest, t.Size())
	case output:
		fmt.Fprintf(&x.params, ", %s* p%d", cType(t), i)
		fmt.Fprintf(&x.locals, "\t\t\tcompute r%d;\n", i)
		fmt.Fprintf(&x.store, "\t\t\tp%d[i] = chorus::store<common, %s>(r%[1]d);\n", i, cType(t))
		x.widest = max(x.widest, t.Size())
		if passed {
			x.args = append(x.args, fmt.Sprintf("r%d", i))
		}
	case number: // is converted like an element
		fmt.Fprintf(&x.params, ", %s v%d", numeralTypes[paramOf(r, t)], i)
		x.args = append(x.args, fmt.Sprintf("chorus::load<common, compute>(v%d)", i))
	case scalar: // the function converts it
		fmt.Fprintf(&x.params, ", %s v%d", numeralTypes[paramOf(r, t)], i)
		x.args = append(x.args, fmt.Sprintf("v%d", i))
	}
}

var numeralTypes = map[Param]string{F64: "double", I64: "long long"}

// elementwiseBody is the kernel. A full block does not test the bounds for each element.
const elementwiseBody = `#line 1 "chorus_elementwise.cu"
extern "C" __global__ void __launch_bounds__(THREADS)
KERNEL(unsigned long long n, unsigned onesPARAMS) {
	typedef COMMON common;
	typedef COMPUTE compute;
	const int items = ITEMS;
	const unsigned long long block = (unsigned long long)blockIdx.x * (THREADS * items);
	const auto run = [&](auto whole) {
ARRAYS#pragma unroll
		for (int k = 0; k < items; k++) {
			const unsigned long long i = block + THREADS * k + threadIdx.x;
			if (!whole.yes && i >= n) continue;
LOAD		}
#pragma unroll
		for (int k = 0; k < items; k++) {
			const unsigned long long i = block + THREADS * k + threadIdx.x;
			if (!whole.yes && i >= n) continue;
CALL		}
	};
	if (block + THREADS * items <= n) run(chorus::Whole());
	else run(chorus::Part());
}
`
