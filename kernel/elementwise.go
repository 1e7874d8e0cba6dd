package kernel

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/memory"
)

// ElementwiseConfig are the options of NewElementwise.
type ElementwiseConfig struct {
	// Inputs makes the code an expression of these names, instead of a function.
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

// NewElementwise makes an element-wise function from code. The last function template in
// the code has one type parameter,
//
//	template <typename T> T axpy(T x, T y, T a) { return a * x + y; }
//
// with one result, or with outputs T& and no result,
//
//	template <typename T> void split(T x, T& whole, T& rest) { ... }
//
// Alternatively the code is an expression of the names in ElementwiseConfig.Inputs. There
// may be 8 inputs and 8 outputs. Nothing is compiled yet: an error in the code is a
// *CompileError of Launch, with the line of the code.
func NewElementwise(code string, cfg *ElementwiseConfig) (*Elementwise, error) {
	e := &Elementwise{code: code, kernels: map[variant]*Kernel{}}
	if cfg != nil {
		e.cfg = *cfg
	}
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

// expression makes a function of an expression.
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

// Close unloads the kernels. Launches must have completed. It is idempotent.
func (e *Elementwise) Close() error {
	if e == nil || !e.owner.Close() {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var errs []error
	for _, m := range e.modules {
		errs = append(errs, m.Close())
	}
	e.modules = nil
	return errors.Join(errs...)
}

// kernel returns the kernel for a variant. The first call compiles it.
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

// build compiles the kernel for a variant. e.mu is held.
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
	kern.GoOnly(src)
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
