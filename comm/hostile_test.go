package comm

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What another process tells is checked before anything is allocated or indexed by it.
func TestHostilePeers(t *testing.T) {
	for _, n := range []int64{-1, math.MinInt64, math.MaxInt64, MaxValueBytes + 1} {
		var e *ValueError
		require.ErrorAs(t, checkHeader("gather values", 3, n), &e)
		require.Equal(t, 3, e.Rank)
	}
	for _, n := range []int64{0, MaxValueBytes} {
		require.NoError(t, checkHeader("gather values", 3, n))
	}
	for _, hosts := range [][]int{nil, {0}, {0, 1, 2, 3}} {
		require.ErrorIs(t, (&admission{Hosts: hosts, Counts: []int{1, 2}}).check(1, 2, 2), ErrMismatch)
	}
	for _, counts := range [][]int{nil, {3}, {2, 1}, {1, 1, 1}, {4, -1}, {3, 0}, {1, 1}, {math.MaxInt, 2}} {
		require.ErrorIs(t, (&admission{Hosts: []int{0, 0, 1}, Counts: counts}).check(1, 2, 2), ErrMismatch, "%v", counts)
	}
	a := &admission{Hosts: []int{0, 0, 1}, Counts: []int{1, 2}}
	require.NoError(t, a.check(1, 2, 2))
	require.Equal(t, []int{0, 1, 1}, a.processes())
	require.ErrorIs(t, (&admission{Refused: "no"}).check(1, 2, 2), ErrMismatch)
}

// forged is a text that prints a line as another program's own.
const forged = "no\r\x1b[Kchorus: all is well\n"

// valued is a Rendezvous in which another rank has published one value for all keys.
type valued struct {
	Rendezvous
	value string
}

func (r valued) Get(context.Context, string) ([]byte, error) { return []byte(r.value), nil }

// alarmed is the Rendezvous of rank 1, in which rank 0 has raised the alarm.
type alarmed struct{ text string }

func (alarmed) Rank() int { return 1 }

func (alarmed) Size() int { return 2 }

func (alarmed) Context() context.Context { return context.Background() }

func (alarmed) Set(context.Context, string, []byte) error { return nil }

func (r alarmed) Get(context.Context, string) ([]byte, error) { return []byte(r.text), nil }

// A broken codec panics.
type broken struct{ gobCodec }

func (broken) Decode([]byte, any) error { panic("index out of range") }

// What another rank has sent ends no process, also if the codec panics.
func TestDecodePanics(t *testing.T) {
	v := 3
	err := decodeValue(Codec(broken{}), "receive value", 1, false, []byte("x"), &v)
	require.EqualError(t, err, "comm: receive value: decode the value of rank 1: its codec panicked: index out of range")
	require.Equal(t, 3, v)
}

// A short value that says that it has millions of elements takes no memory.
func TestDecodeTakesLittleMemory(t *testing.T) {
	lie := func(v any) []byte { // the last length of 1 becomes 1<<22
		b, err := Gob.Encode(v)
		require.NoError(t, err)
		at := bytes.LastIndex(b, []byte{1, 1, 'k'})
		begin := -1
		for i := range at { // of the last message: its length counts what follows
			if int(b[i]) == len(b)-i-1 {
				begin = i
			}
		}
		require.GreaterOrEqual(t, begin, 0)
		b[begin] += 3
		return slices.Concat(b[:at], []byte{0xfd, 0x40, 0, 0}, b[at+1:])
	}
	type held struct{ M map[string]int }
	for _, v := range []any{map[string]int{"k": 1}, []map[string]int{{"k": 1}}, held{map[string]int{"k": 1}}} {
		b, to := lie(v), reflect.New(reflect.TypeOf(v)).Interface()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := Gob.Decode(b, to)
		runtime.ReadMemStats(&after)
		require.Error(t, err, "%T", v)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20), "%T", v)
	}
}

// The ranks of a new group are different ones of its parent.
func TestHostileWorld(t *testing.T) {
	require.NoError(t, checkWorld([]int{5, 3}, []int{3, 4, 5}))
	for _, world := range [][]int{{5, -1}, {5, 1 << 40}, {0}, {4, 4}} {
		require.ErrorIs(t, checkWorld(world, []int{3, 4, 5}), ErrMismatch, "%v", world)
	}
}

// TestForgedTexts gets texts from another process that a terminal would obey.
func TestForgedTexts(t *testing.T) {
	odd := func(text string) bool { return strings.ContainsAny(text, "\r\n\x1b") }
	var v int
	err := decodeValue(Gob, "receive value", 1, true, []byte(forged+strings.Repeat("x", 1<<20)), &v)
	require.ErrorContains(t, err, "no")
	require.False(t, odd(err.Error()), "%.200q", err)
	require.Less(t, len(err.Error()), 2*maxErrorText)

	var a admission
	require.NoError(t, get(t.Context(), valued{value: `{"Refused":"no\r\u001b[Kx\n"}`}, "k", &a))
	require.ErrorContains(t, a.check(1, 2, 1), `no\x0d\x1b[Kx\x0a`)

	err = withAlarm(t.Context(), alarmed{forged + strings.Repeat("x", 1<<20)}, "", func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
	require.ErrorContains(t, err, `no\x0d\x1b[K`)
	require.False(t, odd(err.Error()), "%.200q", err)
	require.Less(t, len(err.Error()), 2*maxErrorText)

	err = errLeft("rank 1 " + forged + strings.Repeat("x", 1<<20))
	require.ErrorIs(t, err, ErrBroken)
	require.False(t, odd(err.Error()), "%.200q", err)
	require.Less(t, len(err.Error()), 2*maxErrorText)

	x, err := (&reporter{r: valued{value: `{"Operation":"no\r","End":"failed: no\u001b[K"}`}}).read(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, []string{`no\x0d`, `failed: no\x1b[K`}, []string{x.Operation, x.End})
}

// FuzzRecords reads records that other processes have published.
func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"Hosts":[0,1],"Counts":[1,1],"Refused":""}`), 2)
	f.Add([]byte(`[{"Host":"a","Machine":"m","PID":1,"UUID":"u","Backend":"cuda"}]`), 2)
	f.Add([]byte(`{"Collectives":7,"Operation":"x","End":"failed: y","First":1,"Services":[1,2]}`), 2)
	f.Add([]byte(`{"Rank":1,"Size":2,"Index":-1}`), 2)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		var a admission
		if size > 0 && json.Unmarshal(b, &a) == nil && a.check(size-1, size, 1) == nil {
			require.Len(t, a.processes(), len(a.Hosts))
			require.GreaterOrEqual(t, len(a.Hosts), size)
		}
		var info []rankInfo
		if get(t.Context(), valued{value: string(b)}, "k", &info) == nil {
			infos := append([]rankInfo{{}}, info...)
			require.Len(t, hostsOf(infos), len(infos))
			_ = incompatibility(infos)
		}
		if e := readNaN(b, 0, size); e != nil {
			require.True(t, 0 < e.Rank && e.Rank < size && e.Index >= 0)
			require.NotEmpty(t, e.Error())
		}
		_, _ = (&reporter{r: valued{value: string(b)}}).read(t.Context(), 1)
	})
}
