package dltest

import (
	_ "embed"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

//go:embed testdata/record.c
var recordC string

// The sizes of record.c.
const (
	recordArgs  = 32
	recordCalls = 8
	recordBytes = 256
)

// firstOut is what recorders write to out-parameters, plus the argument's
// position: an address that neither C nor Go has.
const firstOut = 0x5a5b5c5d5e00

type recordedCall struct {
	fn    uintptr
	words [recordArgs]uintptr
	bytes [recordArgs][recordBytes]byte
}

// Signatures describes the arguments of C functions, one field each:
//
//	i    an int or enum         w    a word: a handle, an address, a size_t
//	b    an unsigned char       S    a 128-byte struct by value
//	oN   the address of an N-byte result; oN=V says what C writes there
//	ON   the address of an array of results, N bytes in all
//	pN   the address of N bytes that C reads
//	s    a string               a    an array of strings, its length just before
//	T    a 64-byte struct       f    a function of ours
//
// A function whose signature begins with * returns a string; with #, a word or a struct of
// two ints; with -, nothing.
type Signatures map[string]string

// Require checks that each function of a table of symbols has a name of its own and a signature, and each signature
// a function.
func (sigs Signatures) Require(t *testing.T, symbols []dl.Func) {
	t.Helper()
	seen := map[string]bool{}
	for i, f := range symbols {
		if _, ok := sigs[f.Name]; !ok || seen[f.Name] {
			t.Errorf("function %d, %q, has no signature, or the name of another function", i, f.Name)
		}
		seen[f.Name] = true
	}
	if len(seen) != len(sigs) {
		t.Errorf("%d functions have %d signatures", len(seen), len(sigs))
	}
}

// A Recorder is a library whose functions record their arguments.
type Recorder struct {
	t      *testing.T
	sigs   Signatures
	lib    *dl.Library
	fns    map[string]uintptr // recorder numbers
	names  map[uintptr]string
	called map[string]bool
	text   []byte
}

// NewRecorder compiles a recorder for the functions. Each function returns
// result; an int is its low half.
func NewRecorder(t *testing.T, sigs Signatures, result uint64) *Recorder {
	t.Helper()
	r := &Recorder{t: t, sigs: sigs, lib: Load(t, recordC), fns: map[string]uintptr{},
		names: map[uintptr]string{}, called: map[string]bool{}, text: []byte("text of C\x00")}
	names := make([]string, 0, len(sigs))
	for name := range sigs {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		returns, args := split(sigs[name])
		fn := uintptr(i/8*10 + i%8)
		if slices.Contains(args, "S") {
			fn = uintptr(98 + len(args) - 4)
		}
		if slices.Contains(args, "T") {
			fn = uintptr(88 + len(args) - 2)
		}
		r.fns[name], r.names[fn] = fn, name
		value := uintptr(result)
		if returns == '*' {
			value = uintptr(unsafe.Pointer(&r.text[0]))
		}
		r.call("plan_result", dl.Get().In(fn, value))
		for k, a := range args {
			kind, size, out := parse(a, k)
			r.call("plan_arg", dl.Get().In(fn, uintptr(k), uintptr(kind), size, out))
		}
	}
	return r
}

// direct begins the signature of a function that is called by Table.Direct.
const direct = "="

// split returns the result kind of a function, or 'i' for an int, and its arguments.
func split(sig string) (returns byte, args []string) {
	sig = strings.TrimPrefix(sig, direct)
	args = strings.Fields(strings.TrimLeft(sig, "*#-"))
	if sig != "" && strings.IndexByte("*#-", sig[0]) >= 0 {
		return sig[0], args
	}
	return 'i', args
}

func parse(arg string, position int) (kind byte, size, out uintptr) {
	arg, value, valued := strings.Cut(arg, "=")
	n, _ := strconv.Atoi(arg[1:])
	size, out = uintptr(n), firstOut+uintptr(position)
	if valued {
		v, _ := strconv.Atoi(value)
		out = uintptr(v)
	}
	switch arg {
	case "S":
		size = 128
	case "T":
		size = 64
	}
	return arg[0], size, out
}

func (r *Recorder) call(name string, f *dl.Frame) int32 {
	r.t.Helper()
	fn, ok := r.lib.Symbol(name)
	if !ok {
		r.t.Fatalf("the recorder lacks %s", name)
	}
	return f.Do(fn)
}

// Resolve is the recorder's dl.Resolver.
func (r *Recorder) Resolve(name string) (uintptr, bool) {
	fn, ok := r.fns[name]
	if !ok {
		return 0, false
	}
	return r.lib.Symbol("record_" + strconv.Itoa(int(fn)))
}

// Take returns the calls since the last Take as C saw them, one line each.
func (r *Recorder) Take() string {
	calls := new([recordCalls]recordedCall)
	n := r.call("take", dl.Get().Ptr(unsafe.Pointer(calls)))
	var lines []string
	for _, c := range calls[:n] {
		lines = append(lines, r.format(c))
	}
	return strings.Join(lines, "; ")
}

// Uncalled lists the functions that no Take has seen.
func (r *Recorder) Uncalled() []string {
	var out []string
	for name := range r.fns {
		if !r.called[name] {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

func (r *Recorder) format(c recordedCall) string {
	name := r.names[c.fn]
	r.called[name] = true
	_, args := split(r.sigs[name])
	passed := recordArgs
	if strings.HasPrefix(r.sigs[name], direct) {
		passed = dl.DirectWords
	}
	var out []string
	for i, a := range args {
		kind, size, _ := parse(a, i)
		out = append(out, formatWord(kind, size, c.words[i], c.bytes[i][:]))
	}
	for i := len(args); i < passed; i++ {
		if c.words[i] != 0 {
			out = append(out, fmt.Sprintf("EXTRA WORD %d: %#x", i, c.words[i]))
		}
	}
	return name + "(" + strings.Join(out, ", ") + ")"
}

func formatWord(kind byte, size, word uintptr, bytes []byte) string {
	switch {
	case kind == 'i':
		return strconv.Itoa(int(int32(word)))
	case kind == 'b':
		return fmt.Sprintf("%#x", byte(word))
	case kind == 'w':
		return fmt.Sprintf("%#x", word)
	case word == 0:
		return "null"
	case kind == 'f':
		return "function"
	case kind == 'o' || kind == 'O':
		return fmt.Sprintf("out%d", size)
	case kind == 's' || kind == 'a':
		return strconv.Quote(dl.CString(bytes))
	}
	return "{" + hex.EncodeToString(bytes[:size]) + "}"
}
