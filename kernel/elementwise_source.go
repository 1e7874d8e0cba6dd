package kernel

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// The name of the kernel and the number of threads in its blocks.
const (
	elementwiseKernel = "chorus_elementwise"
	elementwiseBlock  = 256
)

// elementwiseHead defines the conversions between the types.
//
//go:embed elementwise.cuh
var elementwiseHead string

// cTypes are the names of the types in elementwise.cuh.
var cTypes = map[memory.DType]string{
	memory.Bool: "bool", memory.Int8: "signed char", memory.Uint8: "unsigned char", memory.Int16: "short",
	memory.Uint16: "unsigned short", memory.Int32: "int", memory.Uint32: "unsigned", memory.Int64: "long long",
	memory.Uint64: "unsigned long long", memory.Float16: "chorus::Half", memory.BFloat16: "chorus::BFloat",
	memory.Float32: "float", memory.Float64: "double",
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
	body := strings.NewReplacer("COMMON", cTypes[common], "COMPUTE", cTypes[computeType(common)],
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

// add adds parameter i. An output that is not passed is the result.
func (x *statements) add(i int, r role, t memory.DType, passed bool) {
	switch r {
	case input:
		fmt.Fprintf(&x.params, ", const %s* p%d", cTypes[t], i)
		fmt.Fprintf(&x.arrays, "\t\tcompute a%d[items];\n", i)
		fmt.Fprintf(&x.load, "\t\t\ta%d[k] = chorus::load<common, compute>(p%[1]d[ones >> %[1]d & 1 ? 0 : i]);\n", i)
		x.args = append(x.args, fmt.Sprintf("a%d[k]", i))
		x.widest = max(x.widest, t.Size())
	case output:
		fmt.Fprintf(&x.params, ", %s* p%d", cTypes[t], i)
		fmt.Fprintf(&x.locals, "\t\t\tcompute r%d;\n", i)
		fmt.Fprintf(&x.store, "\t\t\tp%d[i] = chorus::store<common, %s>(r%[1]d);\n", i, cTypes[t])
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
