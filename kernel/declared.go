package kernel

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// A declared parameter is the CUDA source's declaration of a parameter of a kernel.
type declared struct {
	text    string         // as the source has it, for messages
	pointer bool           // one level of indirection
	types   []memory.DType // of the number, or of the elements behind the pointer; nil if unknown
}

// declarations returns the parameters of each kernel of a source. It leaves out kernels
// that it cannot read for certain, such as kernels with two definitions.
func declarations(cuda string) map[string][]declared {
	cuda = comments.ReplaceAllString(cuda, " ")
	all, macros := map[string][]declared{}, map[string]bool{}
	for _, m := range defines.FindAllStringSubmatch(cuda, -1) {
		macros[m[1]] = true
	}
	for _, at := range globals.FindAllStringIndex(cuda, -1) {
		name, list, ok := declarator(cuda[at[1]:])
		if !ok {
			continue
		}
		_, twice := all[name]
		if twice || slices.ContainsFunc(words.FindAllString(list, -1), func(w string) bool { return macros[w] }) {
			all[name] = nil
			continue
		}
		all[name] = parameters(list)
	}
	return all
}

var (
	defines    = regexp.MustCompile(`#\s*define\s+(\w+)`)
	globals    = regexp.MustCompile(`\b__global__\b`)
	beforeList = regexp.MustCompile(`^[\w\s]*?(\w+)\s*\(`)
	// Attributes that may stand between __global__ and the name.
	attribute = regexp.MustCompile(`^(__\w+__|__maxnreg__|alignas)$`)
)

// declarator reads the name and the parameter list behind __global__.
func declarator(code string) (name, list string, ok bool) {
	for {
		m := beforeList.FindStringSubmatchIndex(code)
		if m == nil {
			return "", "", false
		}
		name = code[m[2]:m[3]]
		inside, rest, closed := parenthesised(code[m[1]:])
		if !closed {
			return "", "", false
		}
		if !attribute.MatchString(name) {
			return name, inside, true
		}
		code = rest
	}
}

// parenthesised splits code behind an opening parenthesis at the closing one.
func parenthesised(code string) (inside, rest string, ok bool) {
	depth := 1
	for i, c := range code {
		switch c {
		case '(':
			depth++
		case ')':
			if depth--; depth == 0 {
				return code[:i], code[i+1:], true
			}
		}
	}
	return "", "", false
}

// parameters reads a parameter list. It returns nil if one of the parameters may stand for
// several, as a template with two arguments or an unknown word by itself.
func parameters(list string) []declared {
	if strings.TrimSpace(list) == "" || strings.TrimSpace(list) == "void" {
		return []declared{}
	}
	if strings.ContainsAny(list, "<>(){}#") {
		return nil
	}
	var ps []declared
	for _, text := range strings.Split(list, ",") {
		p := parameterOf(strings.TrimSpace(text))
		if !p.pointer && p.types == nil && !strings.Contains(p.text, " ") {
			return nil
		}
		ps = append(ps, p)
	}
	return ps
}

// qualifiers do not change the type of a parameter.
var qualifiers = []string{"const", "volatile", "restrict", "__restrict__", "__restrict", "__grid_constant__", "std", "cuda"}

func parameterOf(text string) declared {
	p := declared{text: strings.Join(strings.Fields(text), " ")}
	depth := strings.Count(text, "*") + strings.Count(text, "[")
	if depth > 1 || strings.Contains(text, "&") {
		p.pointer = depth > 1
		return p
	}
	p.pointer = depth == 1
	names := slices.DeleteFunc(words.FindAllString(text, -1), func(w string) bool { return slices.Contains(qualifiers, w) })
	if n := len(names); n > 1 && !slices.Contains(typeWords, names[n-1]) {
		names = names[:n-1] // the name of the parameter
	}
	if p.pointer {
		if i := strings.IndexAny(text, "["); i >= 0 && len(names) > 0 && strings.ContainsAny(text[i:], "0123456789") {
			return declared{text: p.text, pointer: true} // the length of an array is among the words
		}
	}
	p.types = typesOf(names, p.pointer)
	return p
}

// typeWords are the words that C's own types consist of. If a type has several, the first
// in this order decides: unsigned long int is a long.
var typeWords = []string{"void", "bool", "float", "double", "char", "short", "long", "int", "unsigned", "signed"}

// typesOf returns the element types that a C type can have in memory, or nil if it knows
// none. C++ lets a program read an integer as its signed or unsigned counterpart, so both
// are in the list. So are the small floats, which kernels without CUDA's headers read as
// integers of their size.
func typesOf(names []string, pointer bool) []memory.DType {
	if len(names) == 1 && pointer {
		if m := vector.FindStringSubmatch(names[0]); m != nil {
			return elementTypes[m[1]]
		}
	}
	if len(names) == 1 {
		return elementTypes[names[0]]
	}
	for _, n := range names {
		if !slices.Contains(typeWords, n) {
			return nil
		}
	}
	for _, w := range typeWords {
		if slices.Contains(names, w) {
			return elementTypes[w]
		}
	}
	return nil
}

// vector matches CUDA's vector types, which are several elements of one type.
var vector = regexp.MustCompile(`^(u?char|u?short|u?int|u?long|u?longlong|float|double|__half|__nv_bfloat16)[1-4]$`)

var (
	bytes1 = []memory.DType{memory.Int8, memory.Uint8, memory.Bool, memory.Float8E4M3T, memory.Float8E5M2T}
	bytes2 = []memory.DType{memory.Int16, memory.Uint16, memory.Float16T, memory.BFloat16T}
	bytes4 = []memory.DType{memory.Int32, memory.Uint32}
	bytes8 = []memory.DType{memory.Int64, memory.Uint64}
	half   = []memory.DType{memory.Float16T}
	bfloat = []memory.DType{memory.BFloat16T}

	elementTypes = map[string][]memory.DType{
		"bool": {memory.Bool}, "float": {memory.Float32}, "double": {memory.Float64},
		"char": bytes1, "int8_t": bytes1, "uint8_t": bytes1, "uchar": bytes1,
		"short": bytes2, "int16_t": bytes2, "uint16_t": bytes2, "ushort": bytes2,
		"int": bytes4, "unsigned": bytes4, "signed": bytes4, "int32_t": bytes4, "uint32_t": bytes4, "uint": bytes4,
		"long": bytes8, "int64_t": bytes8, "uint64_t": bytes8, "size_t": bytes8, "ptrdiff_t": bytes8,
		"uintptr_t": bytes8, "intptr_t": bytes8, "ulong": bytes8, "longlong": bytes8, "ulonglong": bytes8,
		"__half": half, "half": half, "__nv_bfloat16": bfloat, "nv_bfloat16": bfloat,
		"__nv_fp8_e4m3": {memory.Float8E4M3T}, "__nv_fp8_e5m2": {memory.Float8E5M2T},
	}
)

// numberTypes are the element types that a parameter passed by value is like.
var numberTypes = map[Param]memory.DType{
	I8: memory.Int8, U8: memory.Uint8, I16: memory.Int16, U16: memory.Uint16, I32: memory.Int32, U32: memory.Uint32,
	I64: memory.Int64, U64: memory.Uint64, F32: memory.Float32, F64: memory.Float64, B8: memory.Bool, F16: memory.Float16T, BF16: memory.BFloat16T,
}

// compare returns an error if d contradicts its declaration in the source.
func (d *Def) compare(all map[string][]declared) error {
	ps := all[d.Name]
	if ps == nil {
		return nil
	}
	if len(ps) != len(d.Params) {
		return fmt.Errorf("%s has %d parameters in the source, but Params has %d", d.Name, len(ps), len(d.Params))
	}
	for i, p := range ps {
		t, number := numberTypes[d.Params[i]]
		switch {
		case number && p.pointer, number && p.types != nil && !slices.Contains(p.types, t),
			d.Params[i] == Pointer && !p.pointer && p.types != nil && !slices.Equal(p.types, bytes8):
			return fmt.Errorf("parameter %d of %s is %q in the source, but Params says %s", i, d.Name, p.text, d.Params[i])
		}
	}
	return nil
}

// takes reports whether the declaration allows a pointer to elements of type t.
func (p *declared) takes(t memory.DType) bool {
	return !p.pointer || p.types == nil || t == memory.Invalid || slices.Contains(p.types, t)
}
