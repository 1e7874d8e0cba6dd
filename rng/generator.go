package rng

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// StateSize is the number of bytes of a generator's state.
const StateSize = 16

// DefaultSeed is the seed of a new torch.Generator.
const DefaultSeed = 67280421310721

// A Generator is a place in one of 2^64 sequences of random numbers for one
// device; torch.Generator("cuda"). All of its methods may be called at any time
// by any goroutine, and none touches the device.
type Generator struct {
	dev *device.Device

	mu     sync.Mutex
	seed   uint64
	offset uint64 // numbers that each thread has drawn; a multiple of 4

	captures map[uint64]*captured // what graphs draw, by the capture
}

// New returns a generator of its own for dev, at the start of the seed's
// sequence. Generators with one seed draw the same numbers.
func New(dev *device.Device, seed uint64) *Generator { return &Generator{dev: dev, seed: seed} }

var defaultKey kept.Key

// Default returns the device's default generator, the same one on every call. It
// starts with a random seed, as torch.cuda.default_generators do.
func Default(dev *device.Device) *Generator {
	if dev == nil {
		return New(nil, 0) // fills will say what is wrong with it
	}
	return dev.Local(&defaultKey, func() any { return New(dev, randomSeed()) }).(*Generator)
}

// Device returns the device whose memory the generator fills.
func (g *Generator) Device() *device.Device { return g.dev }

// ManualSeed goes to the start of the seed's sequence
// (torch.cuda.manual_seed). A negative seed of torch is its two's complement.
func (g *Generator) ManualSeed(seed uint64) { g.move(position{fixed: true, seed: seed}) }

// Seed goes to the start of a random sequence and returns its seed
// (torch.cuda.seed). In a captured function the seed is drawn once, by the capture.
func (g *Generator) Seed() uint64 {
	seed := randomSeed()
	g.ManualSeed(seed)
	return seed
}

// InitialSeed returns the seed of the sequence (torch.cuda.initial_seed).
func (g *Generator) InitialSeed() uint64 {
	if p, ok := g.position(); ok && p.fixed {
		return p.seed
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seed
}

// Offset returns how many numbers each thread has drawn from the sequence
// (torch.Generator.get_offset). In a captured function it counts from where the generator
// is now, unless the function has set a seed or a state.
func (g *Generator) Offset() uint64 {
	p, captured := g.position()
	if captured && p.fixed {
		return p.offset
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.offset + p.offset
}

// SetOffset goes to another place of the same sequence
// (torch.Generator.set_offset). It must be a multiple of 4. In a captured function it is
// an error, as in torch, unless the function has set a seed or a state: the sequence is
// not known before the launch.
func (g *Generator) SetOffset(offset uint64) error {
	if offset%4 != 0 {
		return fmt.Errorf("rng: set offset %d: want a multiple of 4", offset)
	}
	if p, captured := g.position(); captured {
		if !p.fixed {
			s, _ := stream.Capturer(g.dev.System())
			return &stream.CaptureError{Op: "rng: set offset", Object: s.String(),
				Advice: "each launch has the seed that the generator has then: use ManualSeed or SetState before"}
		}
		g.move(position{fixed: true, seed: p.seed, offset: offset})
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.offset = offset
	return nil
}

// State returns the seed and the offset, 8 bytes each in little-endian order:
// what torch.cuda.get_rng_state returns. In a captured function it returns the place
// within the launch, which only SetState of the same generator in the same capture takes;
// after ManualSeed, or SetState with a state from outside, it is an ordinary state.
func (g *Generator) State() [StateSize]byte {
	if c := g.capturing(); c != nil {
		return c.state()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return encode(g.seed, g.offset)
}

// SetState goes to the place that State, or torch.cuda.get_rng_state, returned
// (torch.cuda.set_rng_state). As in torch, 8 bytes are a seed with the offset 0.
// In a captured function it is a part of the graph: each launch goes there.
func (g *Generator) SetState(state []byte) error {
	seed, offset, err := decode(state)
	if err != nil {
		return fmt.Errorf("rng: set state: %w", err)
	}
	if offset&mark != mark {
		g.move(position{fixed: true, seed: seed, offset: offset})
		return nil
	}
	c := g.capturing()
	if c == nil || c.serial != seed {
		return fmt.Errorf("rng: set state: the state was taken in a captured function, and is a place in the launches of that graph: want a state of this generator, taken in this capture or outside of captures")
	}
	c.move(position{offset: offset &^ mark})
	return nil
}

func encode(seed, offset uint64) (s [StateSize]byte) {
	binary.LittleEndian.PutUint64(s[:8], seed)
	binary.LittleEndian.PutUint64(s[8:], offset)
	return s
}

func decode(state []byte) (seed, offset uint64, err error) {
	switch len(state) {
	case StateSize:
		offset = binary.LittleEndian.Uint64(state[8:])
	case 8:
	default:
		return 0, 0, fmt.Errorf("the state has %d bytes: want %d, or 8 for a seed alone", len(state), StateSize)
	}
	if offset%4 != 0 && offset&mark != mark {
		return 0, 0, fmt.Errorf("the state has the offset %d: want a multiple of 4", offset)
	}
	return binary.LittleEndian.Uint64(state), offset, nil
}

// take returns the generator's place and moves it on, so that nobody else draws
// what the caller is about to.
func (g *Generator) take(increment uint64) (seed, offset uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	seed, offset = g.seed, g.offset
	g.offset += increment
	return seed, offset
}

// randomSeed is of 53 bits, as torch's random seeds are, so that it survives
// being a float64.
func randomSeed() uint64 { return rand.Uint64() >> 11 }
