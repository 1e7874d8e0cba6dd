package testgpu

import (
	"flag"
	"math/rand/v2"
	"testing"
)

var (
	thorough   = flag.Bool("thorough", false, "run every case and all rounds of tests that run some of them by default")
	sampleSeed = flag.Uint64("sampleseed", 0, "the `seed` of the cases that tests draw; 0 is a random one")
)

// Rounds returns n, or all with -thorough.
func Rounds(n, all int) int {
	if *thorough {
		return all
	}
	return n
}

// Sample returns a function that reports whether the test runs its next case. With
// -thorough it runs every case, and otherwise about one in n. The test logs the seed,
// and -sampleseed repeats the choice.
func Sample(t testing.TB, n int) func() bool {
	if *thorough {
		return func() bool { return true }
	}
	seed := *sampleSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("sample seed %d: about one case in %d", seed, n)
	rng := rand.New(rand.NewPCG(seed, 0))
	return func() bool { return rng.IntN(n) == 0 }
}
