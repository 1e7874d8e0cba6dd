package alloc

import (
	"math/rand/v2"
	"testing"
)

// Whatever a program does, and whatever the driver does to it: the books agree with
// themselves, no two blocks overlap, memory changes streams in order, and all comes
// back at the end.
func TestRandomPrograms(t *testing.T) {
	for i := range 40 {
		seed := rand.Uint64()
		t.Logf("seed %#x", seed)
		w := newWorld(t, rand.New(rand.NewPCG(seed, 0)))
		between := 1 + i%2*6 // a look empties the pockets
		for i := range 1500 {
			w.step()
			if i%between == 0 {
				w.check()
			}
		}
		w.finish()
	}
}
