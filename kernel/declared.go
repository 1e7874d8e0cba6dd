package kernel

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// A declared parameter is the declaration of a kernel's parameter in the CUDA source.
type declared struct {
	text    string         // source text, for messages
	pointer bool           // one level of indirection
	types   []memory.DType // of the number, or of the elements at the pointer; nil if unknown
	name    string         // "" if it has none
	input   bool           // a pointer to const: the kernel does not write through it
	align   int            // of the address, for a pointer to a vector such as float4; 0 if any
}

// declarations returns the parameters of each kernel of a source. It omits kernels that it
// cannot parse with certainty, such as kernels with two definitions. It uses no regular
// expression on the whole source: they took most of the time of loading a module.
func declarations(cuda string) map[string][]declared {
	cuda = withoutComments(cuda)
	all, macros, names := map[string][]declared{}, defined(cuda), aliases(cuda)
	for at := 0; ; {
		i := strings.Index(cuda[at:], global)
		if i < 0 {
			return all
		}
		before, after := cuda[:at+i], cuda[at+i+len(global):]
		at += i + len(global)
		if endsInWord(before) || startsWithWord(after) {
			continue
		}
		name, list, ok := declarator(after)
		if !ok {
			continue
		}
		_, twice := all[name]
		if twice || slices.ContainsFunc(words.FindAllString(list, -1), func(w string) bool { return macros[w] }) {
			all[name] = nil
			continue
		}
		all[name] = names.parameters(list)
	}
}

const global = "__global__"

// defined returns the names of the macros that a source without comments defines.
func defined(cuda string) map[string]bool {
	names := map[string]bool{}
	for {
		_, after, found := strings.Cut(cuda, "#")
		if !found {
			return names
		}
		cuda = after
		after, found = strings.CutPrefix(strings.TrimLeft(after, space), "define")
		name := strings.TrimLeft(after, space)
		if found && len(name) < len(after) {
			if n := wordLen(name); n > 0 {
				names[name[:n]] = true
			}
		}
	}
}

var (
	beforeList = regexp.MustCompile(`^[\w\s]*?(\w+)\s*\($`)
	// Attributes that may occur between __global__ and the name.
	attribute = regexp.MustCompile(`^(__\w+__|__maxnreg__|alignas)$`)
)

// declarator reads the name and the parameter list after __global__.
func declarator(code string) (name, list string, ok bool) {
	for {
		before, after, found := strings.Cut(code, "(")
		if !found {
			return "", "", false
		}
		m := beforeList.FindStringSubmatch(code[:len(before)+1])
		if m == nil {
			return "", "", false
		}
		inside, rest, closed := parenthesised(after)
		if !closed {
			return "", "", false
		}
		if !attribute.MatchString(m[1]) {
			return m[1], inside, true
		}
		code = rest
	}
}

// parenthesised splits code after an opening parenthesis at the closing one.
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

// parameters parses a parameter list. It returns nil if a parameter may represent several,
// such as a template with two arguments or an unknown single word.
func (a typeNames) parameters(list string) []declared {
	if strings.TrimSpace(list) == "" || strings.TrimSpace(list) == "void" {
		return []declared{}
	}
	if strings.ContainsAny(list, "<>(){}#") {
		return nil
	}
	var ps []declared
	for _, text := range strings.Split(list, ",") {
		p := a.parameterOf(strings.TrimSpace(text))
		if !p.pointer && p.types == nil && !strings.Contains(p.text, " ") {
			return nil
		}
		ps = append(ps, p)
	}
	return ps
}

// qualifiers do not change the type of a parameter.
var qualifiers = []string{"const", "volatile", "restrict", "__restrict__", "__restrict", "__grid_constant__", "std", "cuda"}

func (a typeNames) parameterOf(text string) declared {
	p := declared{text: strings.Join(strings.Fields(text), " "), name: nameIn(text), input: pointerToConst(text)}
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
			return p // the length of an array is among the words
		}
	}
	if len(names) == 1 && a[names[0]] != nil {
		names = a[names[0]]
	}
	p.types = typesOf(names, p.pointer)
	if p.pointer && len(names) == 1 {
		if n, size, ok := vectorOf(names[0]); ok && n != 3 {
			p.align = min(n*size, 16)
		}
	}
	return p
}

// typeNames are the words of the types that a source gives other names, by these names.
type typeNames map[string][]string

// aliases reads typedef and using declarations of types without pointers. A name that is declared
// twice with different types, as by the branches of an #ifdef, is missing.
func aliases(cuda string) typeNames {
	var all typeNames
	add := func(name, of string) {
		types := words.FindAllString(of, -1)
		if name == "" || len(types) == 0 || strings.ContainsAny(of, "*&<>(){}[]") {
			return
		}
		types = slices.DeleteFunc(types, func(w string) bool { return slices.Contains(qualifiers, w) })
		if all == nil {
			all = typeNames{}
		}
		if old, twice := all[name]; twice && !slices.Equal(old, types) {
			types = nil
		}
		if of := all[strings.Join(types, " ")]; of != nil {
			types = of // of a name of a name
		}
		all[name] = types
	}
	for rest := cuda; ; {
		before, after, found := strings.Cut(rest, "typedef")
		if !found {
			break
		}
		rest = after
		if text, _, ok := strings.Cut(after, ";"); ok && !endsInWord(before) && !startsWithWord(after) {
			text = strings.TrimSpace(text)
			at := len(text)
			for at > 0 && isWordByte(text[at-1]) {
				at--
			}
			add(text[at:], text[:at])
		}
	}
	for rest := cuda; ; {
		before, after, found := strings.Cut(rest, "using")
		if !found {
			return all
		}
		rest = after
		if text, _, ok := strings.Cut(after, ";"); ok && !endsInWord(before) && !startsWithWord(after) {
			if name, of, ok := strings.Cut(text, "="); ok {
				add(strings.TrimSpace(name), of)
			}
		}
	}
}

// nameIn returns the name in the declaration of a parameter, or "".
func nameIn(text string) string {
	text, _, _ = strings.Cut(text, "[")
	names := slices.DeleteFunc(words.FindAllString(text, -1), func(w string) bool { return slices.Contains(qualifiers, w) })
	if n := len(names); n > 1 && !slices.Contains(typeWords, names[n-1]) {
		return names[n-1]
	}
	return ""
}

// pointerToConst reports whether a parameter is a pointer to const elements: const float*
// or float const*, but not float* const.
func pointerToConst(text string) bool {
	before, after, found := strings.Cut(text, "*")
	if !found {
		before, after, found = strings.Cut(text, "[")
	}
	return found && !strings.Contains(after, "*") && slices.Contains(words.FindAllString(before, -1), "const")
}

// typeWords are the words of C's own types. If a type has several, the first in this order
// decides: unsigned long int is a long.
var typeWords = []string{"void", "bool", "float", "double", "char", "short", "long", "int", "unsigned", "signed"}

// typesOf returns the element types that a C type may have in memory, or nil if the type
// is unknown. C++ lets a program read an integer as its signed or unsigned counterpart, so
// both are in the list. So are the small floats, which kernels without CUDA's headers read
// as integers of the same size.
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
	bytes1 = []memory.DType{memory.Int8, memory.Uint8, memory.Bool, memory.Float8E4M3, memory.Float8E5M2}
	bytes2 = []memory.DType{memory.Int16, memory.Uint16, memory.Float16, memory.BFloat16}
	bytes4 = []memory.DType{memory.Int32, memory.Uint32}
	bytes8 = []memory.DType{memory.Int64, memory.Uint64}
	half   = []memory.DType{memory.Float16}
	bfloat = []memory.DType{memory.BFloat16}

	elementTypes = map[string][]memory.DType{
		"bool": {memory.Bool}, "float": {memory.Float32}, "double": {memory.Float64},
		"char": bytes1, "int8_t": bytes1, "uint8_t": bytes1, "uchar": bytes1,
		"short": bytes2, "int16_t": bytes2, "uint16_t": bytes2, "ushort": bytes2,
		"int": bytes4, "unsigned": bytes4, "signed": bytes4, "int32_t": bytes4, "uint32_t": bytes4, "uint": bytes4,
		"long": bytes8, "int64_t": bytes8, "uint64_t": bytes8, "size_t": bytes8, "ptrdiff_t": bytes8,
		"uintptr_t": bytes8, "intptr_t": bytes8, "ulong": bytes8, "longlong": bytes8, "ulonglong": bytes8,
		"__half": half, "half": half, "__nv_bfloat16": bfloat, "nv_bfloat16": bfloat,
		"__nv_fp8_e4m3": {memory.Float8E4M3}, "__nv_fp8_e5m2": {memory.Float8E5M2},
	}
)

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
		t := d.Params[i].elem()
		number := t != memory.Invalid
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

// space has the white space of regular expressions.
const space = " \t\n\f\r"

// withoutComments replaces each comment of C++ code with a space.
func withoutComments(code string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(code, '/')
		if i < 0 {
			b.WriteString(code)
			return b.String()
		}
		n := commentLen(code[i:])
		if n == 0 {
			b.WriteString(code[:i+1])
			code = code[i+1:]
			continue
		}
		b.WriteString(code[:i])
		b.WriteByte(' ')
		code = code[i+n:]
	}
}

// commentLen returns the length of the comment at the start of code, or 0. A comment ends
// before its line's end, or with */; without one the slash is an operator.
func commentLen(code string) int {
	switch {
	case strings.HasPrefix(code, "//"):
		if n := strings.IndexByte(code, '\n'); n >= 0 {
			return n
		}
		return len(code)
	case strings.HasPrefix(code, "/*"):
		if n := strings.Index(code[2:], "*/"); n >= 0 {
			return n + 4
		}
	}
	return 0
}

// wordLen returns the length of the identifier or number at the start of code, or 0.
func wordLen(code string) int {
	for i := range len(code) {
		if !isWordByte(code[i]) {
			return i
		}
	}
	return len(code)
}

func startsWithWord(code string) bool { return code != "" && isWordByte(code[0]) }

func endsInWord(code string) bool { return code != "" && isWordByte(code[len(code)-1]) }

func isWordByte(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
