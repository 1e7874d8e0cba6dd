package alloc

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
)

var soak = flag.Int("soak", 100_000, "how many operations TestSoak does")

// Whatever a program does, and whatever the driver does to it: the books agree with
// themselves, no two blocks overlap, memory changes streams in order, and all comes
// back at the end.
func TestRandomPrograms(t *testing.T) {
	testhost.Serial(t)
	for i := range 40 {
		between := 1 + i%2*6 // a look empties lastFreed
		play(t, rand.Uint64(), 1500, between)
	}
}

// Long programs, looked at now and then. -soak=10000000 takes some minutes.
func TestSoak(t *testing.T) {
	testhost.Serial(t)
	const program = 20_000
	start := time.Now()
	for range max(*soak/program, 1) {
		play(t, rand.Uint64(), program, 500)
	}
	t.Logf("%d operations in %v", *soak, time.Since(start))
}

// play runs a random program and checks it after every so many operations.
func play(t *testing.T, seed uint64, steps, between int) {
	w := newWorld(t, rand.New(rand.NewPCG(seed, 0)))
	defer func() {
		if t.Failed() {
			t.Logf("seed %#x, %d steps, checked after each %d", seed, steps, between)
		}
	}()
	for i := range steps {
		w.step()
		if i%between == 0 {
			w.check()
		}
	}
	w.finish()
}

// A script makes the choices that a fuzzer wrote, as long as there are any.
type script struct{ text []byte }

func (s *script) IntN(n int) int {
	v := 0
	for left := n - 1; left > 0 && len(s.text) > 0; left >>= 8 {
		v = v<<8 | int(s.text[0])
		s.text = s.text[1:]
	}
	return v % n
}

// The seeds in testdata are named after what each does that the others do not.
func FuzzPrograms(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		s := &script{text}
		w := newWorld(t, s)
		for i := 0; len(s.text) > 0 && i < 2000; i++ {
			w.step()
			if i%4 == 0 {
				w.check()
			}
		}
		w.finish()
	})
}
