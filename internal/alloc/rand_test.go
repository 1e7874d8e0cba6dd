package alloc

import (
	"math"
	"math/rand/v2"
)

type rnd struct{ r *rand.Rand }

func newRand() rnd         { return rnd{rand.New(rand.NewPCG(1, 2))} }
func (r rnd) n(n int) int  { return r.r.IntN(n) }
func (r rnd) size() uint64 { return uint64(math.Exp2(r.r.Float64() * 16)) }
