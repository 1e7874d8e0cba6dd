package kernel

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// The names of the kernel and the threads of its blocks.
const (
	elementwiseKernel = "chorus_elementwise"
	elementwiseBlock  = 256
)

// elementwiseHead has the conversions between the types.
//
//go:embed elementwise.cuh
var elementwiseHead string

// cTypes has the types as elementwise.cuh calls them.
var cTypes = map[memory.DType]string{
	memory.Bool: "bool", memory.Int8: "signed char", memory.Uint8: "unsigned char", memory.Int16: "short",
	memory.Uint16: "unsigned short", memory.Int32: "int", memory.Uint32: "unsigned", memory.Int64: "long long",
	memory.Uint64: "unsigned long long", memory.Float16T: "chorus::Half", memory.BFloat16T: "chorus::BFloat",
	memory.Float32: "float", memory.Float64: "double",
}

// computeType is the type that the function is called with.
func computeType(common memory.DType) memory.DType {
	if common == memory.Float16T || common == memory.BFloat16T {
		return memory.Float32
	}
	return common
}

// source writes the kernel for a variant: the inputs of all elements of a
// thread are loaded before the first is computed, so that they are on their way
// together.
func (e *Elementwise) source(v *variant, common memory.DType) string {
	var params, arrays, load, locals, call, store strings.Builder
	widest, calls := 1, []string{}
	for i := range e.arity() {
		a := v.args[i]
		size := a.dtype.Size()
		switch a.role {
		case input:
			fmt.Fprintf(&params, ", const %s* p%d", cTypes[a.dtype], i)
			fmt.Fprintf(&arrays, "\t\tcompute a%d[items];\n", i)
			fmt.Fprintf(&load, "\t\t\ta%d[k] = chorus::load<common, compute>(p%[1]d[ones >> %[1]d & 1 ? 0 : i]);\n", i)
			calls = append(calls, fmt.Sprintf("a%d[k]", i))
			widest = max(widest, size)
		case output:
			fmt.Fprintf(&params, ", %s* p%d", cTypes[a.dtype], i)
			fmt.Fprintf(&locals, "\t\t\tcompute r%d;\n", i)
			fmt.Fprintf(&store, "\t\t\tp%d[i] = chorus::store<common, %s>(r%[1]d);\n", i, cTypes[a.dtype])
			widest = max(widest, size)
			if i < len(e.sig.params) {
				calls = append(calls, fmt.Sprintf("r%d", i))
			}
		default:
			c := map[Param]string{F64: "double", I64: "long long"}[paramOf(a.role, a.dtype)]
			fmt.Fprintf(&params, ", %s v%d", c, i)
			if a.role == number { // an element like others; a scalar is what the function makes of it
				calls = append(calls, fmt.Sprintf("chorus::load<common, compute>(v%d)", i))
			} else {
				calls = append(calls, fmt.Sprintf("v%d", i))
			}
		}
	}
	fmt.Fprintf(&call, "::%s<compute>(%s);", e.sig.name, strings.Join(calls, ", "))
	result := ""
	if e.sig.byReturn {
		result = fmt.Sprintf("r%d = ", len(e.sig.params))
	}
	body := strings.NewReplacer("COMMON", cTypes[common], "COMPUTE", cTypes[computeType(common)],
		"THREADS", fmt.Sprint(elementwiseBlock), "ITEMS", fmt.Sprint(itemsOf(widest)), "KERNEL", elementwiseKernel,
		"PARAMS", params.String(), "ARRAYS", arrays.String(), "LOAD", load.String(),
		"CALL", locals.String()+"\t\t\t"+result+call.String()+"\n"+store.String()).Replace(elementwiseBody)
	return elementwiseHead + "#line 1 \"" + e.sig.name + ".cu\"\n" + e.code + "\n" + body
}

// elementwiseBody is the kernel. A block with all of its elements does not ask
// about each of them.
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
