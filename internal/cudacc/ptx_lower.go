package cudacc

import (
	"fmt"
	"regexp"
	"strings"
)

// A version is a version of PTX times ten: 63 means 6.3.
type version int

func (v version) String() string { return fmt.Sprintf("%d.%d", int(v)/10, int(v)%10) }

// targets maps an architecture to the PTX version that introduced it.
var targets = map[string]version{"50": 40, "52": 41, "53": 42, "60": 50, "61": 50, "62": 50, "70": 60, "72": 61, "75": 63,
	"80": 70, "86": 71, "87": 74, "89": 78, "90": 78, "100": 86, "101": 86, "103": 88, "110": 90, "120": 87, "121": 88}

// A rule lists words that a version introduced.
type rule struct {
	since version
	words string
}

// instructions maps the permitted instructions to the version that introduced
// them; some forms need a newer version, see forms. The generator fails for an
// instruction that is missing here: look it up in NVIDIA's manual and add it.
var instructions = ptxWords([]rule{
	{32, `abs add addc and atom bar bfe bfi bfind bra brev call clz cnot copysign cos cvt cvta div ex2 exit fma
		isspacep ld ldu lg2 lop3 mad mad24 madc max membar min mov mul mul24 neg not or popc prefetch prmt rcp red rem
		ret rsqrt sad selp set setp shf shl shr sin slct sqrt st sub subc testp trap vote xor`},
	{43, `lop3`}, {50, `dp2a dp4a`}, {60, `barrier fence fns match shfl`}, {62, `activemask`}, {63, `nanosleep`},
	{70, `tanh redux`}, {76, `bmsk szext`}, {78, `griddepcontrol mapa getctarank`},
})

// directives does the same for words that start with a dot.
var directives = ptxWords([]rule{
	{40, `version target address_size visible extern weak entry func param reg const global local shared align maxntid
		reqntid minnctapersm maxnreg pragma ptr loc file section branchtargets callprototype
		b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64 pred v2 v4`},
	{40, `attribute`}, {50, `common`}, {64, `noreturn`}, {78, `maxclusterrank reqnctapercluster explicitcluster`},
	{83, `b128`}, {90, `blocksareclusters abi_preserve`},
})

func ptxWords(rules []rule) map[string]version {
	m := map[string]version{}
	for _, r := range rules {
		for _, w := range strings.Fields(r.words) {
			m[w] = max(m[w], r.since)
		}
	}
	return m
}

// forms lists forms of instructions that need a newer version than the
// instruction's name. In doubt they name a version that is too new.
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
	{71, regexp.MustCompile(`\{\s*_\s*,|,\s*_\s*\}`)}, // half of a pair is discarded
	{74, regexp.MustCompile(`\.(L1|L2|level)::`)},
	{77, regexp.MustCompile(`^cvta\.param\b`)}, // for a parameter that is not copied
	{78, regexp.MustCompile(`\.bf16|\.tf32|::cluster|::cta|\.cluster\b|%cluster|%is_explicit_cluster`)},
	{81, regexp.MustCompile(`\.e[0-9]m[0-9]`)},
	{83, regexp.MustCompile(`\.b128\b|param::|%current_graph_exec`)},
	{86, regexp.MustCompile(`\.f32x2\b|\.ue8m0|\.e2m1|\.e3m2|\.e2m3`)},
	{88, regexp.MustCompile(`\.v8\b`)},
}

// pragmas lists hints and old pragmas; others change with the version.
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

// LowerPTX sets the version of a PTX text to the lowest one that its content
// permits, so that older drivers load it.
func LowerPTX(text string) (lowered, lowest string, err error) {
	line := versionLine.FindStringSubmatchIndex(text)
	target := targetLine.FindStringSubmatch(text)
	if line == nil || target == nil {
		return "", "", fmt.Errorf("ptx: the text needs a .version and a .target")
	}
	need, ok := targets[target[1]]
	if !ok || target[2] != "" {
		return "", "", fmt.Errorf("ptx: unknown target sm_%s%s", target[1], target[2])
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
		return "", "", fmt.Errorf("ptx: the text has version %v, but by the table it needs %v", has, need)
	}
	return text[:line[2]] + need.String() + text[line[5]:], need.String(), nil
}

// statements splits a text at semicolons and line ends, and removes comments,
// labels and braces.
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

// unnumbered removes the numbers of registers, labels and parameters from a
// statement. They do not matter here, and most statements then equal an earlier
// one.
func unnumbered(s string) string {
	out := make([]byte, 0, len(s))
	name := false // in a register name or after an underscore
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

// needs returns the version that a statement needs.
func needs(s string) (need version, err error) {
	if m := opcode.FindStringSubmatch(s); m != nil {
		v, ok := instructions[m[1]]
		if !ok && !operands(s) {
			return 0, fmt.Errorf("ptx: the instruction %q in %q is not in the table of internal/cudacc", m[1], s)
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
			return 0, fmt.Errorf("ptx: the pragma %q is not in the table of internal/cudacc", m[1])
		}
		return v, nil
	}
	for _, m := range directive.FindAllStringSubmatch(s, -1) {
		v, ok := directives[m[1]]
		if !ok {
			return 0, fmt.Errorf("ptx: the directive .%s in %q is not in the table of internal/cudacc", m[1], s)
		}
		need = max(need, v)
	}
	return need, nil
}

// continued matches a line of operands, as in calls: only names.
var continued = regexp.MustCompile(`^[\w$%, ]+$`)

func operands(s string) bool { return continued.MatchString(s) && !strings.Contains(s, ".") }
