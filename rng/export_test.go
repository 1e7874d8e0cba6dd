package rng

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
)

type float16 = memory.Float16Bits

func memoryHalf(bits uint16) memory.Float16Bits    { return memory.Float16Bits(bits) }
func memoryBFloat(bits uint16) memory.BFloat16Bits { return memory.BFloat16Bits(bits) }

// For the tests beside the package.
var (
	FromHalf   = fromHalf
	FromBFloat = fromBFloat
	ToHalf     = toHalf
	ToBFloat   = toBFloat
	Words      = words
	Unit32     = unit32
)

// Captures returns how many captures and graphs draw from g.
func Captures(g *Generator) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.captures)
}

// PlacesPool returns the pool of the places of a device's launches.
func PlacesPool(dev *device.Device) *memory.Pool { return placesOf(dev).pool }
