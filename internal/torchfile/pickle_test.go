package torchfile

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// python runs testdata/pickles.py.
func python(t *testing.T, input string, args ...string) []string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here: ", err)
	}
	cmd := exec.Command(path, append([]string{"testdata/pickles.py"}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s", &stderr)
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// marked is what pickles.py makes of the same value. Lists and dictionaries that
// are shared are written out in each place.
func marked(v any) any {
	switch v := v.(type) {
	case int:
		return map[string]any{"int": strconv.Itoa(v)}
	case int64, uint64:
		return map[string]any{"int": fmt.Sprint(v)}
	case float64:
		return map[string]any{"float": pythonHex(v)}
	case Tuple:
		return map[string]any{"tuple": markedAll(v)}
	case List:
		return markedAll(v)
	case *List:
		return markedAll(*v)
	case iter.Seq[any]:
		var l List
		for x := range v {
			l = append(l, x)
		}
		return markedAll(l)
	case Dict:
		entries := []any{}
		for _, i := range v {
			entries = append(entries, []any{marked(i.Key), marked(i.Value)})
		}
		return map[string]any{"dict": entries}
	case *Dict:
		return marked(*v)
	}
	return v
}

func markedAll(l []any) []any {
	out := []any{}
	for _, v := range l {
		out = append(out, marked(v))
	}
	return out
}

// pythonHex is float.hex of Python.
func pythonHex(f float64) string {
	bits := math.Float64bits(f)
	sign, exponent, fraction := "", int(bits>>52&0x7ff), bits&(1<<52-1)
	if bits>>63 != 0 {
		sign = "-"
	}
	switch {
	case exponent == 0 && fraction == 0:
		return sign + "0x0.0p+0"
	case exponent == 0:
		return fmt.Sprintf("%s0x0.%013xp-1022", sign, fraction)
	}
	return fmt.Sprintf("%s0x1.%013xp%+d", sign, fraction, exponent-1023)
}

func TestDecodeWhatPythonWrites(t *testing.T) {
	for seed := range 5 {
		for i, line := range python(t, "", "dump", strconv.Itoa(seed)) {
			var c struct {
				Pickle []byte
				Value  json.RawMessage
			}
			require.NoError(t, json.Unmarshal([]byte(line), &c))
			v, err := DecodePickle(bytes.NewReader(c.Pickle), nil)
			require.NoError(t, err, "seed %d, line %d", seed, i)
			got, err := json.Marshal(marked(v))
			require.NoError(t, err)
			require.JSONEq(t, string(c.Value), string(got), "seed %d, line %d", seed, i)
		}
	}
}

func TestPythonLoadsWhatIsEncoded(t *testing.T) {
	const seed = 7
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var input strings.Builder
	var want []any
	for range 300 {
		v := random(r, 0)
		var b bytes.Buffer
		require.NoError(t, EncodePickle(&b, v))
		fmt.Fprintln(&input, base64.StdEncoding.EncodeToString(b.Bytes()))
		want = append(want, v)

		back, err := DecodePickle(&b, nil)
		require.NoError(t, err)
		require.Equal(t, marked(v), marked(back))
	}
	for i, line := range python(t, input.String(), "load") {
		text, err := json.Marshal(marked(want[i]))
		require.NoError(t, err)
		require.JSONEq(t, string(text), line, "value %d", i)
	}
}

func random(r *rand.Rand, depth int) any {
	n := r.IntN(6)
	items := func() (l []any) {
		for range n {
			l = append(l, random(r, depth+1))
		}
		return l
	}
	kinds := 13
	if depth > 4 {
		kinds = 8
	}
	switch r.IntN(kinds) {
	case 0:
		return nil
	case 1:
		return r.IntN(2) == 0
	case 2:
		return r.IntN(1 << 17)
	case 3:
		return int64(r.Uint64()) >> r.IntN(64)
	case 4:
		return r.Uint64()
	case 5:
		return math.Ldexp(r.NormFloat64(), r.IntN(2000)-1000)
	case 6:
		return []any{math.MinInt64, int64(math.MinInt32), int64(math.MinInt32) - 1, math.MaxInt32, math.MaxInt32 + 1, 255, 256,
			65535, 65536, -1, uint64(math.MaxUint64), uint64(math.MaxInt64), math.SmallestNonzeroFloat64, 0.0}[r.IntN(14)]
	case 7:
		return []string{"", "addr", "größe", "𝄞", strings.Repeat("y", 70000), strconv.Itoa(r.IntN(400))}[r.IntN(6)]
	case 8:
		return Tuple(items())
	case 9:
		return List(items())
	case 10:
		l := List(items())
		return Tuple{&l, 1, &l}
	case 11:
		return values(items())
	default:
		d := Dict{}
		for i := range n {
			d = append(d, DictItem{fmt.Sprint("key ", i), random(r, depth+1)})
		}
		return d
	}
}

func TestLongLists(t *testing.T) {
	for _, n := range []int{0, 1, batch - 1, batch, batch + 1, 3 * batch} {
		l := List{}
		for i := range n {
			l = append(l, int64(i))
		}
		var b bytes.Buffer
		require.NoError(t, EncodePickle(&b, l))
		v, err := DecodePickle(&b, nil)
		require.NoError(t, err)
		require.Equal(t, marked(l), marked(v))
	}
}

func TestSharing(t *testing.T) {
	l, d := &List{"frame"}, &Dict{{"a", 1}}
	var b bytes.Buffer
	require.NoError(t, EncodePickle(&b, List{l, d, Tuple{l}, d, "frame"}))
	require.Equal(t, 1, bytes.Count(b.Bytes(), []byte("frame")), "a string is written once")
	v, err := DecodePickle(&b, nil)
	require.NoError(t, err)
	got := *v.(*List)
	require.Same(t, got[0], got[2].(Tuple)[0])
	require.Same(t, got[1], got[3])
	require.NotSame(t, got[0], got[1])
}

func TestGet(t *testing.T) {
	d := Dict{{"a", 1}, {7, 2}, {"a", 3}}
	v, ok := d.Get("a")
	require.True(t, ok)
	require.Equal(t, 3, v)
	_, ok = d.Get("b")
	require.False(t, ok)
}

func TestEncodeRefuses(t *testing.T) {
	loop := &List{}
	*loop = append(*loop, List{loop})
	require.NoError(t, EncodePickle(&bytes.Buffer{}, loop), "what points to itself is written once")
	var deep any
	for range 2 * deepest {
		deep = List{deep}
	}
	require.ErrorContains(t, EncodePickle(&bytes.Buffer{}, deep), "more than 64 levels")
	require.ErrorContains(t, EncodePickle(&bytes.Buffer{}, List{int32(1)}), "a int32 cannot be pickled")
	require.ErrorIs(t, EncodePickle(brokenWriter{}, "x"), errBroken)
	require.NoError(t, EncodePickle(&bytes.Buffer{}, "not UTF-8: \xff"))
}

var errBroken = errors.New("broken")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

var refused = map[string]struct{ pickle, want string }{
	"empty":              {"", "unexpected EOF"},
	"no pickle":          {`{"segments": []}`, "not a pickle of protocol 2 to 5"},
	"protocol 1":         {"\x80\x01N.", "not a pickle of protocol 2 to 5"},
	"protocol 6":         {"\x80\x06N.", "not a pickle of protocol 2 to 5"},
	"cut":                {"\x80\x02]q", "unexpected EOF"},
	"cut string":         {"\x80\x02X\x05\x00\x00\x00abc", "at byte 10: unexpected EOF"},
	"huge string":        {"\x80\x02X\x00\x00\x00\x7fabc", "unexpected EOF"},
	"not UTF-8":          {"\x80\x02X\x01\x00\x00\x00\xff.", "not valid UTF-8"},
	"a class":            {"\x80\x02cos\nsystem\n.", `opcode 0x63 ('c') is not allowed`},
	"a call":             {"\x80\x02)R.", "without classes and calls"},
	"two values":         {"\x80\x02NN.", "with 2 values and 0 marks"},
	"a mark left":        {"\x80\x02N(.", "with 1 values and 1 marks"},
	"nothing":            {"\x80\x02.", "with 0 values"},
	"no mark":            {"\x80\x02]e.", "without a mark"},
	"no list":            {"\x80\x02Na.", "a container that is not on the stack"},
	"appends to nothing": {"\x80\x02(Ne.", "a container that is not on the stack"},
	"appends to None":    {"\x80\x02N(Ne.", "appended to a <nil>"},
	"list below a mark":  {"\x80\x02](Na.", "a container that is not on the stack"},
	"items of a list":    {"\x80\x02]NNs.", "entries are set in a *torchfile.List"},
	"odd":                {"\x80\x02}(Nu.", "a key without a value"},
	"odd dict":           {"\x80\x02(Nd.", "a key without a value"},
	"list as key":        {"\x80\x02}]Ns.", "cannot be a key"},
	"short tuple":        {"\x80\x02N\x86.", "too few items"},
	"tuple over a mark":  {"\x80\x02N(N\x86.", "too few items"},
	"empty memo":         {"\x80\x02h\x00.", "value 0 of the memo"},
	"memo with a hole":   {"\x80\x02Nq\x01.", "write of value 1 of the memo"},
	"memo of nothing":    {"\x80\x02\x94.", "a memo opcode without a value"},
	"memo of a mark":     {"\x80\x02N(\x94.", "a memo opcode without a value"},
	"65 bits":            {"\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.", "at most 64 bits"},
	"-65 bits":           {"\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff.", "at most 64 bits"},
	"80 bits":            {"\x80\x02\x8a\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00.", "at most 64 bits"},
}

func TestDecodeRefuses(t *testing.T) {
	for name, c := range refused {
		t.Run(name, func(t *testing.T) {
			_, err := DecodePickle(strings.NewReader(c.pickle), nil)
			require.ErrorContains(t, err, "pickle: read at byte ")
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestLimits(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, EncodePickle(&b, List{"a", "b", "c"}))
	size := int64(b.Len())
	_, err := DecodePickle(bytes.NewReader(b.Bytes()), &PickleLimits{Bytes: size})
	require.NoError(t, err)
	_, err = DecodePickle(bytes.NewReader(b.Bytes()), &PickleLimits{Bytes: size - 1})
	require.ErrorContains(t, err, "more than")
	_, err = DecodePickle(bytes.NewReader(b.Bytes()), &PickleLimits{Values: 8}) // list, mark, three strings, which are memoised
	require.NoError(t, err)
	_, err = DecodePickle(bytes.NewReader(b.Bytes()), &PickleLimits{Values: 7})
	require.ErrorContains(t, err, "more than 7 values")
}

// A length that is not there costs no memory, and neither do the shortest
// opcodes more than a hundred times theirs.
func TestMemory(t *testing.T) {
	cost := func(p []byte) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = DecodePickle(bytes.NewReader(p), nil)
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	require.Less(t, cost([]byte("\x80\x02X\x00\x00\x00\x7f")), uint64(1<<20))
	for _, op := range []byte{opMark, opEmptyDict, opEmptyList, opEmptyTuple, opNone} {
		n := testhost.Rounds(1<<18, 1<<20)
		require.Less(t, cost(append([]byte{opProto, 2}, bytes.Repeat([]byte{op}, n)...)), uint64(200*n), "%q", op)
	}
}

func FuzzDecode(f *testing.F) {
	for _, v := range []any{nil, List{Tuple{1, 2}, "a", "a", 1.5, true}, Dict{{"k", uint64(math.MaxUint64)}}} {
		var b bytes.Buffer
		require.NoError(f, EncodePickle(&b, v))
		f.Add(b.Bytes())
	}
	for _, c := range refused {
		f.Add([]byte(c.pickle))
	}
	f.Add([]byte("\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."))
	f.Fuzz(func(t *testing.T, p []byte) {
		v, err := DecodePickle(bytes.NewReader(p), &PickleLimits{Values: 1 << 16})
		if err != nil || tooLarge(v) {
			return
		}
		var b bytes.Buffer
		require.NoError(t, EncodePickle(&b, v))
		back, err := DecodePickle(&b, nil)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("%#v", marked(v)), fmt.Sprintf("%#v", marked(back)))
	})
}

// tooLarge tells that the value contains itself, is deep, or would be large if
// what is shared were written out.
func tooLarge(v any) bool {
	n := 0
	var walk func(v any, depth int) bool
	walk = func(v any, depth int) bool {
		if n++; n > 10000 || depth > deepest-2 {
			return true
		}
		var l List
		switch v := v.(type) {
		case Tuple:
			l = List(v)
		case *List:
			l = *v
		case *Dict:
			for _, i := range *v {
				l = append(l, i.Key, i.Value)
			}
		}
		for _, x := range l {
			if walk(x, depth+1) {
				return true
			}
		}
		return false
	}
	return walk(v, 0)
}
