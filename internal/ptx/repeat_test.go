package ptx

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// alikeTexts are texts of the same lines, of which few differ.
func alikeTexts(rng *rand.Rand, n int) []byte {
	var b bytes.Buffer
	for range n {
		for line := range 100 {
			fmt.Fprintf(&b, "\tadd.s64 \t%%rd%d, %%rd%d, %%rd%d;\n", line*17, line*line, rng.IntN(10)/9)
		}
	}
	return b.Bytes()
}

// What is taken apart comes together again, as far as is asked for.
func TestRepeats(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed ", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	noise := make([]byte, 5000)
	for i := range noise {
		noise[i] = byte(rng.IntN(3))
	}
	for name, all := range map[string][]byte{
		"nothing": nil, "short": []byte("short"), "one byte": bytes.Repeat([]byte("a"), 1000), "period": bytes.Repeat([]byte("abc"), 1000),
		"noise": noise, "noise twice": append(noise[:len(noise):len(noise)], noise...), "texts": alikeTexts(rng, 30),
	} {
		repeats, fresh := split(all)
		for _, n := range []int{0, 1, len(all) / 3, len(all) - 1, len(all)} {
			if n < 0 || n > len(all) {
				continue
			}
			got, err := join(repeats, fresh, n)
			require.NoError(t, err, name)
			require.True(t, bytes.Equal(all[:n], got), "%s: %d of %d bytes", name, n, len(all))
		}
		_, err := join(repeats, fresh, len(all)+1)
		require.ErrorIs(t, err, errRepeat, name)
	}
	all := alikeTexts(rng, 30)
	repeats, fresh := split(all)
	require.Less(t, len(repeats)+len(fresh), len(all)/10)
}

// What is broken is an error or something else, no more.
func TestBrokenRepeats(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed ", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	all := alikeTexts(rng, 3)
	repeats, fresh := split(all)
	wrong := 0
	for range 20_000 {
		r := bytes.Clone(repeats)
		for range 1 + rng.IntN(3) {
			r[rng.IntN(len(r))] = byte(rng.Uint32())
		}
		got, err := join(r[:rng.IntN(len(r)+1)], fresh, len(all))
		if err != nil {
			require.ErrorIs(t, err, errRepeat)
			wrong++
			continue
		}
		require.Len(t, got, len(all))
	}
	require.NotZero(t, wrong)
}

// BenchmarkFind measures what it takes to have the last of texts of ten megabytes.
func BenchmarkFind(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	var entries []Entry
	for i := range 50 {
		entries = append(entries, Entry{Digest: Digest("x", []string{fmt.Sprint(i)}), Name: fmt.Sprint(i), Arch: Arch, Compiler: "x", Version: "6.3", Text: alikeTexts(rng, 70)})
	}
	packed := Pack(entries)
	b.ReportMetric(float64(len(packed)), "packed-bytes")
	b.ReportAllocs()
	for b.Loop() {
		e, err := Open(packed).Find(entries[len(entries)-1].Digest)
		require.NoError(b, err)
		require.Equal(b, entries[len(entries)-1].Name, e.Name)
	}
}
