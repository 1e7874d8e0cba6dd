package ptx

import (
	"fmt"
	"regexp"
	"strings"
)

// A version of PTX is its number times ten: 63 is 6.3.
type version int

func (v version) String() string { return fmt.Sprintf("%d.%d", int(v)/10, int(v)%10) }

// targets has the version that came with an architecture.
var targets = map[string]version{"50": 40, "52": 41, "53": 42, "60": 50, "61": 50, "62": 50, "70": 60, "72": 61, "75": 63,
	"80": 70, "86": 71, "87": 74, "89": 78, "90": 78, "100": 86, "101": 86, "103": 88, "110": 90, "120": 87, "121": 88}

// A rule is a version that brought something.
type rule struct {
	since version
	words string
}

// instructions has those that may occur, with the version that every form in
// use needs at least; the forms below may need more. One that is not here makes
// the generator stop: look it up in NVIDIA's manual and add it.
var instructions = words([]rule{
	{32, `abs add addc and atom bar bfe bfi bfind bra brev call clz cnot copysign cos cvt cvta div ex2 exit fma
		isspacep ld ldu lg2 lop3 mad mad24 madc max membar min mov mul mul24 neg not or popc prefetch prmt rcp red rem
		ret rsqrt sad selp set setp shf shl shr sin slct sqrt st sub subc testp trap vote xor`},
	{43, `lop3`}, {50, `dp2a dp4a`}, {60, `barrier fence fns match shfl`}, {62, `activemask`}, {63, `nanosleep`},
	{70, `tanh redux`}, {76, `bmsk szext`}, {78, `griddepcontrol mapa getctarank`},
})

// directives is the same for what begins with a dot.
var directives = words([]rule{
	{40, `version target address_size visible extern weak entry func param reg const global local shared align maxntid
		reqntid minnctapersm maxnreg pragma ptr loc file section branchtargets callprototype
		b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64 pred v2 v4`},
	{40, `attribute`}, {50, `common`}, {64, `noreturn`}, {78, `maxclusterrank reqnctapercluster explicitcluster`},
	{83, `b128`}, {90, `blocksareclusters abi_preserve`},
})

func words(rules []rule) map[string]version {
	m := map[string]version{}
	for _, r := range rules {
		for _, w := range strings.Fields(r.words) {
			m[w] = max(m[w], r.since)
		}
	}
	return m
}

// forms are what makes an instruction need more than its name does. They err on
// the side of a newer version.
var forms = []struct {
	since version
	form  *regexp.Regexp
}{
	{60, regexp.MustCompile(`\.(sync|relaxed|acquire|release|acq_rel)\b`)},
	{42, regexp.MustCompile(`\.f16\b`)},
	{42, regexp.MustCompile(`\.f16x2\b`)},
	{70, regexp.MustCompile(`^(abs|neg|min|max|ex2|tanh)\b.*\.f16`)},
	{70, regexp.MustCompile(`\.NaN\b|\.relu\b`)},
	{72, regexp.MustCompile(`\.xorsign\b`)},
	{71, regexp.MustCompile(`\{\s*_\s*,|,\s*_\s*\}`)}, // half of a pair goes nowhere
	{74, regexp.MustCompile(`\.(L1|L2|level)::`)},
	{77, regexp.MustCompile(`^cvta\.param\b`)}, // of a parameter that is not copied
	{78, regexp.MustCompile(`\.bf16|\.tf32|::cluster|::cta|\.cluster\b|%cluster|%is_explicit_cluster`)},
	{81, regexp.MustCompile(`\.e[0-9]m[0-9]`)},
	{83, regexp.MustCompile(`\.b128\b|param::|%current_graph_exec`)},
	{86, regexp.MustCompile(`\.f32x2\b|\.ue8m0|\.e2m1|\.e3m2|\.e2m3`)},
	{88, regexp.MustCompile(`\.v8\b`)},
}

// pragmas has those that are hints or old; others change with the version.
var pragmas = map[string]version{"nounroll": 20, "used_bytes_mask": 83, "frequency": 90, "enable_smem_spilling": 90}

var (
	comment     = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	versionLine = regexp.MustCompile(`(?m)^\.version[ \t]+(\d+)\.(\d)[ \t]*$`)
	targetLine  = regexp.MustCompile(`(?m)^\.target[ \t]+sm_(\d+)([a-z]?)`)
	opcode      = regexp.MustCompile(`^(?:@!?%\w+\s+)?([a-z][a-z0-9_]*)\b(?:[.\s]|$)`)
	directive   = regexp.MustCompile(`(?:^|[\s(,])\.([a-z_][a-z0-9_]*)`)
	pragmaLine  = regexp.MustCompile(`\.pragma\s+"(\w+)`)
	label       = regexp.MustCompile(`^(?:[\w$%]+:\s*)+`)
)

// Lower gives a text the lowest version of PTX that what is in it allows, so
// that older drivers load it.
func Lower(text string) (lowered, lowest string, err error) {
	line := versionLine.FindStringSubmatchIndex(text)
	target := targetLine.FindStringSubmatch(text)
	if line == nil || target == nil {
		return "", "", fmt.Errorf("ptx: the text has no .version or no .target")
	}
	need, ok := targets[target[1]]
	if !ok || target[2] != "" {
		return "", "", fmt.Errorf("ptx: nothing is known of the target sm_%s%s", target[1], target[2])
	}
	seen := map[string]bool{}
	for _, s := range statements(text) {
		like := unnumbered(s)
		if seen[like] {
			continue
		}
		seen[like] = true
		v, err := needs(s)
		if err != nil {
			return "", "", err
		}
		need = max(need, v)
	}
	var major, minor int
	fmt.Sscan(text[line[2]:line[3]], &major)
	fmt.Sscan(text[line[4]:line[5]], &minor)
	if has := version(major*10 + minor); need > has {
		return "", "", fmt.Errorf("ptx: the text is of version %v and the table says that it needs %v", has, need)
	}
	return text[:line[2]] + need.String() + text[line[5]:], need.String(), nil
}

// statements are the parts of a text between semicolons and line ends, less
// comments, labels and the braces of blocks.
func statements(text string) (out []string) {
	text = comment.ReplaceAllString(text, " ")
	for _, s := range strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == ';' }) {
		s = label.ReplaceAllString(strings.TrimSpace(s), "")
		if s = strings.Trim(s, "{}(), \t"); s != "" {
			out = append(out, s)
		}
	}
	return out
}

// unnumbered is a statement without the numbers of its registers, labels and parameters,
// which do not matter: most statements are then like an earlier one.
func unnumbered(s string) string {
	out := make([]byte, 0, len(s))
	name := false // of a register, or behind an underscore
	for i := range len(s) {
		c := s[i]
		switch {
		case c == '%' || c == '_':
			name = true
		case c >= '0' && c <= '9' && name:
			continue
		case c < 'a' || c > 'z':
			name = false
		}
		out = append(out, c)
	}
	return string(out)
}

// needs is the version that one statement needs.
func needs(s string) (need version, err error) {
	if m := opcode.FindStringSubmatch(s); m != nil {
		v, ok := instructions[m[1]]
		if !ok && !operands(s) {
			return 0, fmt.Errorf("ptx: the instruction %q in %q is not in the table of internal/ptx", m[1], s)
		}
		need = v
		for _, f := range forms {
			if f.since > need && f.form.MatchString(s) {
				need = f.since
			}
		}
		return need, nil
	}
	if m := pragmaLine.FindStringSubmatch(s); m != nil {
		v, ok := pragmas[m[1]]
		if !ok {
			return 0, fmt.Errorf("ptx: the pragma %q is not in the table of internal/ptx", m[1])
		}
		return v, nil
	}
	for _, m := range directive.FindAllStringSubmatch(s, -1) {
		v, ok := directives[m[1]]
		if !ok {
			return 0, fmt.Errorf("ptx: the directive .%s in %q is not in the table of internal/ptx", m[1], s)
		}
		need = max(need, v)
	}
	return need, nil
}

// continued is a line of operands, as calls have them: names alone.
var continued = regexp.MustCompile(`^[\w$%, ]+$`)

func operands(s string) bool { return continued.MatchString(s) && !strings.Contains(s, ".") }
