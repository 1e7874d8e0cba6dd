package rng

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// StateSize is the number of bytes of a generator's state.
const StateSize = 16

// A Generator is a position in one of 2^64 sequences of random numbers for one
// device, like torch.Generator("cuda"). Methods are safe for concurrent use and
// do not use the device.
type Generator struct {
	dev *device.Device

	mu     sync.Mutex
	seed   uint64
	offset uint64 // numbers drawn by each thread; a multiple of 4

	captures map[uint64]*captured // draws of graphs, by capture id
}

// New returns a new generator for dev at the start of the seed's sequence.
// Generators with the same seed draw the same numbers.
func New(dev *device.Device, seed uint64) *Generator { return &Generator{dev: dev, seed: seed} }

var defaultKey kept.Key

// Default returns the default generator of the device, which is the same at every
// call. It starts with a random seed, like torch.cuda.default_generators.
func Default(dev *device.Device) *Generator {
	if dev == nil {
		return New(nil, 0) // fills return an error
	}
	return gpu.DeviceOf(dev).Local(&defaultKey, func() any { return New(dev, randomSeed()) }).(*Generator)
}

// Device returns the device whose memory the generator fills.
func (g *Generator) Device() *device.Device { return g.dev }

// ManualSeed moves to the start of the seed's sequence (torch.cuda.manual_seed).
// A negative seed in torch is the two's complement.
func (g *Generator) ManualSeed(seed uint64) { g.move(position{fixed: true, seed: seed}) }

// Seed moves to the start of a random sequence and returns its seed
// (torch.cuda.seed). In a captured function the seed is drawn once, during the
// capture.
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

// Offset returns the count of numbers that each thread has drawn from the
// sequence (torch.Generator.get_offset). In a captured function it is relative to
// the generator's current offset, unless the function has set a seed or a state.
func (g *Generator) Offset() uint64 {
	p, captured := g.position()
	if captured && p.fixed {
		return p.offset
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.offset + p.offset
}

// SetOffset moves to another offset of the same sequence
// (torch.Generator.set_offset). It must be a multiple of 4. In a captured
// function it is an error, as in torch, unless the function has set a seed or a
// state, because the sequence is unknown before the launch.
func (g *Generator) SetOffset(offset uint64) error {
	if offset%4 != 0 {
		return fmt.Errorf("rng: set offset %d: want a multiple of 4", offset)
	}
	if p, captured := g.position(); captured {
		if !p.fixed {
			s := gpu.CaptureOf(gpu.DeviceOf(g.dev).System()).Stream
			return &device.CaptureError{Op: "rng: set offset", Object: s.String(),
				Advice: "each launch uses the generator's seed at that time: call ManualSeed or SetState before"}
		}
		g.move(position{fixed: true, seed: p.seed, offset: offset})
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.offset = offset
	return nil
}

// State returns the seed and the offset, 8 little-endian bytes each, like
// torch.cuda.get_rng_state. In a captured function it returns a position within
// the launch, which is valid only for SetState of the same generator in the same
// capture. After ManualSeed, or SetState with another state, it is an ordinary
// state.
func (g *Generator) State() [StateSize]byte {
	if c := g.capturing(); c != nil {
		return c.state()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return encode(g.seed, g.offset)
}

// SetState moves to a position returned by State or torch.cuda.get_rng_state
// (torch.cuda.set_rng_state). As in torch, 8 bytes are a seed with offset 0. In a
// captured function it is part of the graph: each launch moves there.
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
		return fmt.Errorf("rng: set state: the state is a position in the launches of another graph: want a state of this generator from this capture or from outside of captures")
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
		return 0, 0, fmt.Errorf("the offset of the state is %d: want a multiple of 4", offset)
	}
	return binary.LittleEndian.Uint64(state), offset, nil
}

// take advances the generator and returns its previous position, so that no other
// fill draws the same numbers.
func (g *Generator) take(increment uint64) (seed, offset uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	seed, offset = g.seed, g.offset
	g.offset += increment
	return seed, offset
}

// randomSeed returns a seed of 53 bits, like torch's random seeds, so that a
// float64 can represent it.
func randomSeed() uint64 { return rand.Uint64() >> 11 }
