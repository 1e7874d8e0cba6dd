package testgpu

import (
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/gochorus/chorus/internal/testgpu/tsan"
)

var (
	thorough   = flag.Bool("thorough", false, "run every case and all rounds of tests that run some of them by default")
	sampleSeed = flag.Uint64("sampleseed", 0, "`seed` of the sampled cases; 0: random")
)

// Rounds returns n, or all with -thorough.
func Rounds(n, all int) int {
	if *thorough {
		return all
	}
	return n
}

// Sample returns a function that reports whether the test should run its next
// case: every case with -thorough, otherwise about one in n. The test logs the
// seed; -sampleseed repeats the choice.
func Sample(t testing.TB, n int) func() bool {
	if *thorough || n <= 1 {
		return func() bool { return true }
	}
	seed := drawnSeed()
	t.Logf("sample seed %d: about one case in %d", seed, n)
	rng := rand.New(rand.NewPCG(seed, 0))
	return func() bool { return rng.IntN(n) == 0 }
}

// SampleRaced is Sample if the race detector watches the test. Without it every case runs.
func SampleRaced(t testing.TB, n int) func() bool {
	return Sample(t, tsan.Rounds(n, 1))
}

// TurnsRaced returns a function that selects one of n variants for the case with a number:
// the next case has the next variant. Without the race detector, and with -thorough, each
// case has all variants. The test logs the seed of the first choice; -sampleseed repeats it.
func TurnsRaced(t testing.TB, n int) func(number, variant int) bool {
	if *thorough || !tsan.On {
		return func(int, int) bool { return true }
	}
	seed := drawnSeed()
	t.Logf("sample seed %d: one of %d variants for each case", seed, n)
	first := rand.New(rand.NewPCG(seed, 0)).IntN(n)
	return func(number, variant int) bool { return (first+number)%n == variant }
}

func drawnSeed() uint64 {
	if *sampleSeed != 0 {
		return *sampleSeed
	}
	return rand.Uint64()
}
