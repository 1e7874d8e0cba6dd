package rng

import "github.com/gochorus/chorus/memory"

type float16 = memory.Float16

func memoryHalf(bits uint16) memory.Float16    { return memory.Float16(bits) }
func memoryBFloat(bits uint16) memory.BFloat16 { return memory.BFloat16(bits) }

// For the tests beside the package.
var (
	FromHalf   = fromHalf
	FromBFloat = fromBFloat
)

// Captures returns how many captures and graphs draw from g.
func Captures(g *Generator) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.captures)
}
