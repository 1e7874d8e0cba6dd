package torchfile

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// recorder turns everything into text, and allows the module "ok" only.
type recorder struct{}

type made struct{ text string }

func (recorder) Global(module, name string) (any, error) {
	if module != "ok" {
		return nil, fmt.Errorf("global %s.%s", module, name)
	}
	return &made{name}, nil
}

func (recorder) Call(global any, args Tuple) (any, error) {
	g, ok := global.(*made)
	if !ok {
		return nil, errors.New("it is not a global")
	}
	return &made{fmt.Sprintf("%s%v", g.text, args)}, nil
}

func (recorder) Build(object, state any) error {
	object.(*made).text += fmt.Sprintf("=%v", state)
	return nil
}

func (recorder) Persistent(id any) (any, error) { return &made{fmt.Sprint("at ", id)}, nil }

func TestObjects(t *testing.T) {
	for what, tc := range map[string]struct{ in, want string }{
		"call":       {"\x80\x02cok\nf\nK\x01\x85R.", "f[1]"},
		"new object": {"\x80\x04\x8c\x02ok\x8c\x01f\x93)\x81.", "f[]"},
		"state":      {"\x80\x02cok\nf\n)RK\x07b.", "f[]=7"},
		"persistent": {"\x80\x02K\x05Q.", "at 5"},
		"bytes":      {"\x80\x03cok\nf\nC\x01a\x85R.", "f[a]"},
	} {
		v, err := DecodePickleObjects(strings.NewReader(tc.in), nil, recorder{})
		require.NoError(t, err, what)
		require.Equal(t, tc.want, v.(*made).text, what)
		_, err = DecodePickle(strings.NewReader(tc.in), nil)
		require.ErrorContains(t, err, "is not allowed", what)
	}
	v, err := DecodePickleObjects(strings.NewReader("\x80\x04\x8f(K\x01K\x02\x90."), nil, recorder{})
	require.NoError(t, err)
	require.Equal(t, &List{int64(1), int64(2)}, v)
}

func TestObjectMistakes(t *testing.T) {
	for in, says := range map[string]string{
		"\x80\x02cos\nsystem\n.":                          "global os.system",
		"\x80\x04\x8c\x02os\x8c\x06system\x93.":           "global os.system",
		"\x80\x04K\x01\x8c\x06system\x93.":                "the module and the name of a global are a int64 and a string",
		"\x80\x02K\x01)R.":                                "it is not a global",
		"\x80\x02cok\nf\nK\x01R.":                         "a call has arguments of type int64: want a tuple",
		"\x80\x02R.":                                      "a call without two values on the stack",
		"\x80\x02)(R.":                                    "a call without two values on the stack",
		"\x80\x02K\x01(K\x01b.":                           "the state of an object without two values",
		"\x80\x02Q.":                                      "a persistent identifier is not on the stack",
		"\x80\x02\x90.":                                   "items of a set without a mark",
		"\x80\x02c" + strings.Repeat("x", 300) + "\nf\n.": "longer than 256 bytes",
		"\x80\x02cok\nf":                                  "unexpected EOF",
		"\x80\x02c\xff\nf\n.":                             "not valid UTF-8",
		"\x80\x02(K\x01\x90.":                             "a container that is not on the stack",
		"\x80\x02C\x05ab":                                 "unexpected EOF",
		"\x80\x02B\xff\xff\x7f\x00ab":                     "unexpected EOF",
		"\x80\x02i":                                       `opcode 0x69 ('i') is not allowed`,
	} {
		_, err := DecodePickleObjects(strings.NewReader(in), nil, recorder{})
		require.ErrorContains(t, err, says, "%q", in)
	}
}

// An itemOf has the list of an item, and its value as marked returns it.
type itemOf struct {
	list int
	item any
}

func decodeItems(t *testing.T, p []byte) (rest any, got []itemOf) {
	t.Helper()
	rest, err := DecodePickleItems(bytes.NewReader(p), nil, "lists", func(list int, item any) error {
		got = append(got, itemOf{list, marked(item)})
		return nil
	})
	require.NoError(t, err)
	return rest, got
}

// The items that are passed, and what remains, are together what DecodePickle returns.
func checkItems(t *testing.T, p []byte) {
	t.Helper()
	whole, err := DecodePickle(bytes.NewReader(p), nil)
	require.NoError(t, err)
	rest, got := decodeItems(t, p)
	lists, _ := whole.(*Dict).Get("lists")
	left, _ := rest.(*Dict).Get("lists")
	require.Len(t, *left.(*List), len(*lists.(*List)))
	n := 0
	for i, l := range *lists.(*List) {
		for _, v := range *l.(*List) {
			require.Equal(t, i, got[n].list)
			require.Equal(t, marked(v), got[n].item)
			n++
		}
		require.Empty(t, *(*left.(*List))[i].(*List))
		*l.(*List) = nil
	}
	require.Len(t, got, n)
	require.Equal(t, marked(whole), marked(rest))
}

func TestDecodeItems(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed ", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	frames := &List{"frame"}
	for range 50 {
		lists := List{}
		for range r.IntN(4) {
			l := &List{}
			for range r.IntN(3) * r.IntN(3*batch/2) {
				*l = append(*l, &Dict{{"action", "alloc"}, {"addr", r.IntN(1 << 20)}, {"frames", frames}, {"any", random(r, 3)}})
			}
			lists = append(lists, l)
		}
		var b bytes.Buffer
		require.NoError(t, EncodePickle(&b, Dict{{"before", random(r, 2)}, {"frames", frames}, {"lists", &lists}, {"after", random(r, 2)}}))
		checkItems(t, b.Bytes())
	}
}

func TestDecodeItemsOfPython(t *testing.T) {
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here: ", err)
	}
	out, err := exec.Command(path, "-c", `
import base64, pickle
f = [{"name": "f"}]
def e(i): return {"action": "alloc", "addr": i, "frames": f, "own": [], "pool": (0, i)}
for lists in [], [[]], [[e(1)]], [[e(i) for i in range(2500)]], [[e(1), e(2)], [], [e(3)], [e(i) for i in range(1001)]]:
	for protocol in 2, 3, 4, 5:
		p = pickle.dumps({"segments": [e(7)], "lists": lists, "settings": {"x": 1.5}}, protocol=protocol)
		print(base64.b64encode(p).decode())`).Output()
	require.NoError(t, err)
	for line := range strings.Lines(string(out)) {
		p, err := base64.StdEncoding.DecodeString(strings.TrimSpace(line))
		require.NoError(t, err)
		checkItems(t, p)
	}
}

func TestDecodeItemsRefuses(t *testing.T) {
	failed := errors.New("failed")
	for _, c := range []struct{ pickle, want string }{
		{"\x80\x02}X\x05\x00\x00\x00lists](]}q\x00ah\x00e.", `an item of "lists" occurs twice`},
		{"\x80\x02}X\x05\x00\x00\x00lists](]Kaae", "failed"},
		{"\x80\x02}X\x05\x00\x00\x00lists](]", "unexpected EOF"},
	} {
		_, err := DecodePickleItems(strings.NewReader(c.pickle), nil, "lists", func(_ int, item any) error {
			if item == any(int64('a')) {
				return failed
			}
			return nil
		})
		require.ErrorContains(t, err, c.want, "%q", c.pickle)
	}
	_, err := DecodePickleItems(strings.NewReader("\x80\x02}X\x05\x00\x00\x00lists](]Kaae"), nil, "lists", func(int, any) error { return failed })
	require.ErrorIs(t, err, failed)
}

// An item that is used again and again does not free values for others.
func TestItemsDoNotRaiseTheLimit(t *testing.T) {
	dict := "}q\x00(" + strings.Repeat("NN", 1000) + "u"
	p := "\x80\x02(" + dict + "0}X\x05\x00\x00\x00lists](]" + strings.Repeat("h\x00a", 100) + strings.Repeat("]", 5000)
	p = strings.Replace(p, "0}", "}", 1)
	_, err := DecodePickleItems(strings.NewReader(p), &PickleLimits{Values: 5000}, "lists", func(int, any) error { return nil })
	require.ErrorContains(t, err, "more than 5000 values")
}

// An item that a writer also puts into a list that stays does not stay there.
func TestItemsInOtherLists(t *testing.T) {
	const item = "}(" + "NNNN" + "u"
	p := "\x80\x02}X\x05\x00\x00\x00lists](](" + item + "q\x00ee" + "s."
	rest, err := DecodePickleItems(strings.NewReader(p), nil, "lists", func(_ int, item any) error {
		require.Len(t, *item.(*Dict), 2)
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, Dict{{"lists", &List{&List{}}}}, *rest.(*Dict))

	var kept []*Dict
	_, err = DecodePickleItems(strings.NewReader(p), nil, "lists", func(_ int, item any) error {
		kept = append(kept, item.(*Dict))
		return nil
	})
	require.NoError(t, err)
	require.Empty(t, *kept[0])
}

// Items take almost no memory after they were passed.
func TestItemsAreNotKept(t *testing.T) {
	const n = 200_000
	var b bytes.Buffer
	l := &List{}
	for i := range n {
		*l = append(*l, &Dict{{"action", "alloc"}, {"addr", i}, {"size", 2 * i}, {"time", 3 * i}})
	}
	require.NoError(t, EncodePickle(&b, Dict{{"lists", List{l}}}))
	l = nil
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, most, i := heap(), int64(0), 0
	_, err := DecodePickleItems(&b, &PickleLimits{Values: 4 * n}, "lists", func(int, any) error {
		if i++; i%(n/10) == 0 {
			most = max(most, heap()-before)
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, n, i)
	require.Less(t, most, int64(40*n), "bytes for each item")
}

// The time to read a pickle is proportional to its size, however deep its lists are and however many items come at once.
func TestItemsTakeLinearTime(t *testing.T) {
	const n = 400_000
	const begin = "\x80\x02}X\x05\x00\x00\x00lists]"
	for name, p := range map[string]string{
		"lists":              "\x80\x02" + strings.Repeat("]", n) + strings.Repeat("a", n-1) + ".",
		"lists below a key":  begin + strings.Repeat("]", n) + strings.Repeat("a", n) + "s.",
		"marks":              begin + strings.Repeat("(]", n) + strings.Repeat("e", n) + "s.",
		"dictionaries":       begin + "]" + strings.Repeat("}N", n) + "N" + strings.Repeat("s", n) + "aas.",
		"values of keys":     "\x80\x02" + strings.Repeat("}N", n) + "N" + strings.Repeat("s", n) + ".",
		"tuples":             "\x80\x02)" + strings.Repeat("\x85", n) + ".",
		"after a long batch": begin + "](" + strings.Repeat("}", n) + "e" + strings.Repeat("}a", n) + "as.",
		"memo":               begin + "]" + strings.Repeat("}\x94a", n) + "as.",
	} {
		start := time.Now()
		_, err := DecodePickleItems(strings.NewReader(p), nil, "lists", func(int, any) error { return nil })
		t.Log(name, time.Since(start))
		require.NoError(t, err, name)
		require.Less(t, time.Since(start), 15*time.Second, "%s: linear time is less than a second, and quadratic time is more than 40 s", name)
	}
}
