package element_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/element"
)

// FMA rounds once, as a sum of unlimited precision does.
func TestFMA(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	exact := func(x float32) *big.Float { return new(big.Float).SetPrec(400).SetFloat64(float64(x)) }
	for range 20_000 {
		a := math.Float32frombits(random.Uint32()&0x807fffff | (100+random.Uint32N(50))<<23)
		b := math.Float32frombits(random.Uint32()&0x807fffff | (100+random.Uint32N(50))<<23)
		c := math.Float32frombits(random.Uint32()&0x80000fff | (90+random.Uint32N(80))<<23)
		sum := new(big.Float).SetPrec(400).Mul(exact(a), exact(b))
		want, _ := sum.Add(sum, exact(c)).Float32()
		require.Equal(t, want, element.FMA(a, b, c), "%v * %v + %v", a, b, c)
	}
}
