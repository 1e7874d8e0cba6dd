package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// limitsOfVirtual returns the limits of the kernels of a source on virtual devices. If NVRTC is
// installed, it compiles the source, and returns the compiler's errors. Otherwise the limits are
// those that the source declares.
func limitsOfVirtual(dev *device.Device, src *Source, defs map[string]definition) (map[string]machine.Limits, error) {
	declared := map[string]machine.Limits{}
	for name, d := range defs {
		declared[name] = d.limits
	}
	if inside.IsResident(src) || inside.IsGoOnly(src) || inside.Archive(src) != nil {
		return declared, nil // of Chorus
	}
	c, err := newCompiler(dev, src)
	if errors.Is(err, errors.ErrUnsupported) {
		sayOnce()
		return declared, src.checkText()
	}
	if err != nil {
		return nil, err
	}
	return c.limits(src, declared)
}

// limits compiles a source and reads the limits of its kernels. If the compiler is too old for the
// architecture, they are those that the source declares.
func (c *compiler) limits(src *Source, declared map[string]machine.Limits) (map[string]machine.Limits, error) {
	image, err := c.binary(src)
	if err != nil {
		return nil, err
	}
	limits, err := cubinLimits(image, c.arch)
	if err != nil {
		return declared, nil // PTX
	}
	for _, d := range src.Kernels {
		if _, found := limits[d.Name]; !found {
			return nil, fmt.Errorf("kernel: find %s in %s: the binary has no kernel of this name: declare it extern \"C\" __global__", d.Name, src.Name)
		}
	}
	return limits, nil
}

var unchecked sync.Once

// sayOnce logs what virtual devices cannot check without NVRTC, in tests, which rely on them.
func sayOnce() {
	if flag.Lookup("test.v") == nil {
		return
	}
	unchecked.Do(func() {
		slog.Info("kernel: virtual devices check kernels by their declarations only: not their registers and local memory, and their C++ code only if g++ compiles it", "cause", "NVRTC is not installed")
	})
}

// Attributes of .nv.info, and the format of those that have a payload of its own size.
const (
	attrMaxThreads = 0x05 // of a block, in x, y and z
	attrFrameSize  = 0x11 // local memory of a thread
	attrRegisters  = 0x2f
	formatSized    = 4
)

// Since sm_90 the shared memory of a kernel that has any begins with 1 KiB for the system, which the
// binary counts and the driver's attribute does not.
const (
	archReserves = 90
	reserved     = 1 << 10
)

// cubinLimits reads the limits of the kernels in a binary for an architecture.
func cubinLimits(image []byte, arch int) (map[string]machine.Limits, error) {
	if len(image) < 64 {
		return nil, errors.New("kernel: read a binary: it is too short")
	}
	image = bytes.Clone(image)
	binary.LittleEndian.PutUint32(image[20:], uint32(elf.EV_CURRENT)) // where binaries have CUDA's version
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("kernel: read a binary: %w", err)
	}
	symbols, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("kernel: read a binary: %w", err)
	}
	limits, constBytes := map[string]machine.Limits{}, 0
	for _, s := range f.Sections {
		if name, ok := strings.CutPrefix(s.Name, ".text."); ok {
			limits[name] = machine.Limits{}
		}
		if s.Name == ".nv.constant3" {
			constBytes = int(s.Size)
		}
	}
	set := func(name string, change func(*machine.Limits)) {
		if l, ok := limits[name]; ok {
			change(&l)
			limits[name] = l
		}
	}
	for name := range limits {
		set(name, func(l *machine.Limits) { l.ConstBytes = constBytes })
	}
	for _, s := range f.Sections {
		if name, ok := strings.CutPrefix(s.Name, ".nv.shared."); ok {
			size := int(s.Size)
			if arch >= archReserves {
				size = max(0, size-reserved)
			}
			set(name, func(l *machine.Limits) { l.SharedBytes = size })
		}
		name, ofKernel := strings.CutPrefix(s.Name, ".nv.info.")
		if s.Name != ".nv.info" && !ofKernel {
			continue
		}
		data, err := s.Data()
		if err != nil {
			return nil, fmt.Errorf("kernel: read %s of a binary: %w", s.Name, err)
		}
		err = readInfo(data, func(attr byte, words []uint32) {
			switch {
			case attr == attrMaxThreads && ofKernel && len(words) >= 3:
				set(name, func(l *machine.Limits) { l.MaxThreads = int(words[0] * words[1] * words[2]) })
			case len(words) < 2 || words[0] < 1 || int(words[0]) > len(symbols):
			case attr == attrRegisters:
				set(symbols[words[0]-1].Name, func(l *machine.Limits) { l.Registers = int(words[1]) })
			case attr == attrFrameSize:
				set(symbols[words[0]-1].Name, func(l *machine.Limits) { l.LocalBytes = int(words[1]) })
			}
		})
		if err != nil {
			return nil, fmt.Errorf("kernel: read %s of a binary: %w", s.Name, err)
		}
	}
	return limits, nil
}

// readInfo calls f with each attribute of a section .nv.info and the words of its payload.
func readInfo(data []byte, f func(attr byte, words []uint32)) error {
	for len(data) >= 4 {
		format, attr, size := data[0], data[1], int(binary.LittleEndian.Uint16(data[2:]))
		data = data[4:]
		if format != formatSized {
			continue // the value is in the size
		}
		if size > len(data) {
			return fmt.Errorf("attribute %#x has %d bytes: the section ends after %d", attr, size, len(data))
		}
		words := make([]uint32, size/4)
		for i := range words {
			words[i] = binary.LittleEndian.Uint32(data[4*i:])
		}
		f(attr, words)
		data = data[size:]
	}
	return nil
}

// A definition is what the source of a kernel says about the compiled kernel to a reader without a
// compiler.
type definition struct {
	limits  machine.Limits
	dynamic bool // it has dynamic shared memory
	mangled bool // it is not extern "C", so that its name in the binary is another one
}

// definitions reads the kernels of a source, except what it cannot read with
// certainty.
func definitions(cuda string) map[string]definition {
	cuda = withoutComments(cuda)
	all, macros := map[string]definition{}, defined(cuda)
	numbers := numbers{source: cuda}
	linkage := linkages{code: cuda}
	for at := 0; ; {
		i := strings.Index(cuda[at:], global)
		if i < 0 {
			return all
		}
		begin := at + i
		after := cuda[begin+len(global):]
		at = begin + len(global)
		if endsInWord(cuda[:begin]) || startsWithWord(after) {
			continue
		}
		name, _, ok := declarator(after)
		if !ok {
			continue
		}
		d, declared := all[name] // of an earlier declaration, whose linkage counts
		before := cuda[strings.LastIndexAny(cuda[:begin], ";}\n")+1 : begin]
		isMacro := func(w string) bool { return macros[w] }
		if !declared && !strings.HasPrefix(strings.TrimSpace(before), "#") && !slices.ContainsFunc(words.FindAllString(before, -1), isMacro) {
			d.mangled = !linkage.isC(begin) && !strings.Contains(lastLines(cuda[:begin]), `extern "C"`)
		}
		head, body, _ := strings.Cut(after, "{")
		if strings.Contains(head, "__launch_bounds__") {
			if m := launchBounds.FindStringSubmatch(head); m != nil {
				if n, ok := numbers.value(m[1]); ok {
					d.limits.MaxThreads = int(n)
				}
			}
		}
		if !strings.Contains(head, ";") {
			d.readBody(inBraces(body), &numbers)
		}
		all[name] = d
	}
}

var (
	launchBounds = regexp.MustCompile(`__launch_bounds__\s*\(\s*([^,()]+?)\s*[,)]`)
	externShared = regexp.MustCompile(`extern\s+__shared__|__shared__\s+extern`)
	// An array in the body of a kernel: qualifiers, type, name and dimensions.
	arrayOf = regexp.MustCompile(`(?:^|[;{}])\s*((?:(?:static|__shared__|__align__\s*\(\s*\d+\s*\)|alignas\s*\(\s*\d+\s*\)|volatile|unsigned|signed)\s+)*)([A-Za-z_]\w*(?:\s+(?:long|int|char|short))*)\s+(\w+)\s*((?:\[[^\]]*\]\s*)+)`)
	oneDim  = regexp.MustCompile(`\[([^\]]*)\]`)
)

// lastLines returns the declaration specifiers that end the code.
func lastLines(code string) string { return code[strings.LastIndexAny(code, ";}")+1:] }

// inBraces returns the code until the brace that closes it.
func inBraces(code string) string {
	depth := 1
	for i := range len(code) {
		switch code[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return code[:i]
			}
		}
	}
	return code
}

// leastLocal is the size from which a local array counts: the compiler keeps smaller ones in
// registers, or removes them.
const leastLocal = 512 << 10

func (d *definition) readBody(body string, numbers *numbers) {
	shared := strings.Contains(body, "__shared__")
	if !shared && !hasLongArray(body) {
		return // regular expressions are slow
	}
	d.dynamic = shared && externShared.MatchString(body)
	for _, m := range arrayOf.FindAllStringSubmatch(body, -1) {
		qualifiers, size := m[1], typeSize(m[1]+m[2])
		for _, dim := range oneDim.FindAllStringSubmatch(m[4], -1) {
			n, ok := numbers.value(strings.TrimSpace(dim[1]))
			if !ok {
				n = 0
			}
			size *= int(n)
		}
		switch {
		case strings.Contains(qualifiers, "__shared__"):
			d.limits.SharedBytes = (d.limits.SharedBytes+15)/16*16 + size
		case size > leastLocal:
			d.limits.LocalBytes += size
		}
	}
}

// hasLongArray reports whether a body has a bracket with a number of four digits, or a name.
func hasLongArray(body string) bool {
	for {
		_, after, found := strings.Cut(body, "[")
		if !found {
			return false
		}
		body = strings.TrimLeft(after, space)
		if n := wordLen(body); n >= 4 && strings.HasPrefix(strings.TrimLeft(body[n:], space), "]") && (body[0] <= '9' || strings.ToUpper(body[:n]) == body[:n]) {
			return true
		}
	}
}

// typeSize returns the size of a type, or 0 if it is unknown.
func typeSize(name string) int {
	names := slices.DeleteFunc(words.FindAllString(name, -1), func(w string) bool {
		return slices.Contains([]string{"static", "__shared__", "volatile", "__align__", "alignas", "const"}, w) || w[0] >= '0' && w[0] <= '9'
	})
	if len(names) == 1 {
		if n, of, ok := vectorOf(names[0]); ok {
			return n * of
		}
	}
	if types := typesOf(names, false); types != nil {
		return types[0].Size()
	}
	return 0
}

// vectorOf returns the number and the size of the elements of a vector type of CUDA.
func vectorOf(name string) (n, size int, ok bool) {
	m := vector.FindStringSubmatch(name)
	if m == nil || elementTypes[m[1]] == nil {
		return 0, 0, false
	}
	n, _ = strconv.Atoi(name[len(name)-1:])
	return n, elementTypes[m[1]][0].Size(), true
}

// linkages finds the blocks extern "C" { }.
type linkages struct {
	code  string
	at    int
	stack []bool // for each open brace, whether it is of such a block
}

// isC reports whether the code at a position, which is not before that of the last call, is in
// such a block.
func (l *linkages) isC(to int) bool {
	for ; l.at < to; l.at++ {
		switch l.code[l.at] {
		case '{':
			l.stack = append(l.stack, strings.HasSuffix(strings.TrimRight(l.code[:l.at], space), `extern "C"`))
		case '}':
			l.stack = l.stack[:max(0, len(l.stack)-1)]
		}
	}
	return slices.Contains(l.stack, true)
}

// numbers are the integer constants of a source by name. A name with two values has the value "".
type numbers struct {
	source string
	all    map[string]string // nil until a name is looked up
}

var constant = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$|\b(?:constexpr|const)\s+(?:static\s+)?(?:unsigned|int|size_t|long|unsigned int)\s+(\w+)\s*=\s*([^;]+);`)

func constants(cuda string) map[string]string {
	all := map[string]string{}
	for _, m := range constant.FindAllStringSubmatch(cuda, -1) {
		name, value := m[1]+m[3], strings.TrimSpace(m[2]+m[4])
		if old, twice := all[name]; twice && old != value {
			value = ""
		}
		all[name] = value
	}
	return all
}

// value evaluates an expression of numbers, names, +, -, * and parentheses.
func (n *numbers) value(expression string) (int64, bool) {
	e := evaluation{numbers: n, rest: expression}
	v := e.sum()
	return v, !e.failed && strings.TrimSpace(e.rest) == ""
}

type evaluation struct {
	*numbers
	rest   string
	depth  int
	failed bool
}

func (e *evaluation) next(c byte) bool {
	e.rest = strings.TrimLeft(e.rest, space)
	if e.rest != "" && e.rest[0] == c {
		e.rest = e.rest[1:]
		return true
	}
	return false
}

func (e *evaluation) sum() int64 {
	v := e.product()
	for !e.failed {
		switch {
		case e.next('+'):
			v += e.product()
		case e.next('-'):
			v -= e.product()
		default:
			return v
		}
	}
	return v
}

func (e *evaluation) product() int64 {
	v := e.factor()
	for !e.failed && e.next('*') {
		v *= e.factor()
	}
	return v
}

func (e *evaluation) factor() int64 {
	if e.next('(') {
		v := e.sum()
		e.failed = e.failed || !e.next(')')
		return v
	}
	n := wordLen(e.rest)
	word := e.rest[:n]
	e.rest = e.rest[n:]
	if v, err := strconv.ParseInt(strings.TrimRight(word, "uUlL"), 0, 32); err == nil {
		return v
	}
	if e.all == nil {
		e.all = constants(e.source)
	}
	text, ok := e.all[word]
	if !ok || text == "" || e.depth > 8 {
		e.failed = true
		return 0
	}
	inner := evaluation{numbers: e.numbers, rest: text, depth: e.depth + 1}
	v := inner.sum()
	e.failed = inner.failed || strings.TrimSpace(inner.rest) != ""
	return v
}

// checkNames returns an error for a kernel that is not in the source, or whose name the compiler mangles.
func (src *Source) checkNames(all map[string]definition) error {
	for _, d := range src.Kernels {
		if _, found := all[d.Name]; !found && !mayHave(src, d.Name) {
			return fmt.Errorf("kernel: compile %s: the source has no kernel %s", src.Name, d.Name)
		}
		if all[d.Name].mangled {
			return fmt.Errorf(`kernel: compile %s: %s is not extern "C", so that the compiler mangles its name: declare it extern "C" __global__`, src.Name, d.Name)
		}
	}
	return nil
}

// mayHave reports whether a source has a name, or may get it from a header, a macro or stored PTX.
func mayHave(src *Source, name string) bool {
	return inside.Archive(src) != nil || len(src.Options) > 0 || strings.Contains(src.CUDA, "##") || includeLine.MatchString(src.CUDA) || slices.Contains(words.FindAllString(src.CUDA, -1), name)
}

// checkText finds, on machines without NVRTC, mistakes that NVRTC would find in
// the options and the names of headers.
func (src *Source) checkText() error {
	for i := 0; i < len(src.Options); i++ {
		name, _, _ := strings.Cut(src.Options[i], "=")
		switch {
		case slices.Contains(separateOptions, name) && !strings.Contains(src.Options[i], "="):
			i++ // the next one is its value
		case !knownOption(src.Options[i]):
			return fmt.Errorf("kernel: compile %s: %w: %q is not an option of NVRTC", src.Name, cudacc.ErrorInvalidOption, src.Options[i])
		}
	}
	folders := includeFolders(src.Options)
	for _, m := range includeLine.FindAllStringSubmatch(withoutComments(src.CUDA), -1) {
		if path, _ := readHeader(m[1], ".", folders); path == "" && !maybeHeader(m[1]) && !strings.Contains(src.CUDA, "__has_include") && !strings.Contains(src.CUDA, "#if") {
			return &CompileError{Source: src.Name, Err: cudacc.ErrorCompilation,
				Log: fmt.Sprintf("cannot open source file %q", m[1]), Hint: "give its folder with --include-path"}
		}
	}
	return nil
}

// separateOptions are options of NVRTC whose value may be the next option.
var separateOptions = []string{"--include-path", "-I", "--define-macro", "-D", "--undefine-macro", "-U", "--gpu-architecture", "-arch",
	"--std", "-std", "--maxrregcount", "-maxrregcount", "--pre-include", "-include", "--diag-suppress", "--diag-error", "--diag-warn", "--ptxas-options", "-Xptxas"}

// options are the other options of NVRTC 12 and 13, without the value after =.
var options = strings.Fields(`--device-c -dc --device-w -dw --relocatable-device-code -rdc --extensible-whole-program -ewp --device-debug -G
	--generate-line-info -lineinfo --dopt -dopt --ptxas-options -Xptxas --maxrregcount -maxrregcount --ftz -ftz --prec-sqrt -prec-sqrt
	--prec-div -prec-div --fmad -fmad --use_fast_math -use_fast_math --extra-device-vectorization -extra-device-vectorization
	--modify-stack-limit -modify-stack-limit --dlink-time-opt -dlto --gen-opt-lto -gen-opt-lto --optix-ir -optix-ir --jump-table-density -jtd
	--device-stack-protector -device-stack-protector --no-source-include -no-source-include --no-cache -no-cache --frandom-seed -frandom-seed
	--builtin-move-forward -builtin-move-forward --builtin-initializer-list -builtin-initializer-list --disable-warnings -w
	--Wreorder -Wreorder --warning-as-error -Werror --restrict -restrict --device-as-default-execution-space -default-device
	--device-int128 -device-int128 --device-float128 -device-float128 --optimization-info -opt-info --display-error-number -err-no
	--no-display-error-number -no-err-no --version-ident -dQ --brief-diagnostics -brief-diag --time -time --split-compile -split-compile
	--fdevice-syntax-only -fdevice-syntax-only --minimal -minimal --device-time-trace -fdevice-time-trace --pch -pch --create-pch --use-pch
	--pch-dir -pch-dir --pch-verbose -pch-verbose --pch-messages -pch-messages --instantiate-templates-in-pch --offload-arch
	--Ofast-compile -Ofc --dump-callgraph --apply-controls --no-lineinfo-inlined-at --Wformat`)

func knownOption(option string) bool {
	name, _, _ := strings.Cut(option, "=")
	for _, prefix := range []string{"-D", "-U", "-I"} {
		if strings.HasPrefix(option, prefix) && len(option) > 2 {
			return true
		}
	}
	return slices.Contains(options, name) || slices.Contains(separateOptions, name)
}

// maybeHeader reports whether a header may be one of CUDA, of its libraries or of C++, which are
// not on every machine.
var maybeHeader = regexp.MustCompile(`^(cuda|cub/|thrust/|nv/|nvtx|cooperative_groups|cutlass/|cute/|mma\.h|curand|cublas|cufft|device_|vector_|math_|builtin_types|surface_|texture_|sm_\d|crt/|host_|driver_|library_types|channel_|common_functions|[a-z_]+$|(assert|complex|ctype|errno|float|limits|math|std\w+|string|time|inttypes|stdint|wchar)\.h$)`).MatchString
