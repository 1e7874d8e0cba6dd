package testgpu

import (
	"math"
	"testing"
)

// Allocs is testing.AllocsPerRun, but the least of ten rounds: other goroutines, such as those
// of virtual devices, allocate too, and a call that allocates does so in every round.
func Allocs(runs int, f func()) float64 {
	least := math.Inf(1)
	for round := 0; round < 10 && least > 0; round++ {
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}
