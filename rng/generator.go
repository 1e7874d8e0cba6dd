package rng

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
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

var defaultKey handle.Key

// Default returns the default generator of the device, which is the same at
// every call, and starts with a random seed, like
// torch.cuda.default_generators.
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

// SetOffset moves to another offset of the same sequence, which must be a
// multiple of 4 (torch.Generator.set_offset). In a captured function it is an
// error, as in torch, unless the function has set a seed or a state, because
// the sequence is unknown before the launch.
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

// The functions below apply to the default generators of several devices. Without
// devices they apply to all devices of the default System, as in torch. They
// process one device after another, so concurrent fills may see some generators
// before and others after the change.

// ManualSeedAll sets the seed of the devices' default generators
// (torch.cuda.manual_seed_all).
func ManualSeedAll(seed uint64, devs ...*device.Device) error {
	devs, err := all("manual seed", devs)
	if err != nil {
		return err
	}
	for _, d := range devs {
		Default(d).ManualSeed(seed)
	}
	return nil
}

// SeedAll sets one random seed for the devices' default generators and returns it
// (torch.cuda.seed_all).
func SeedAll(devs ...*device.Device) (uint64, error) {
	seed := randomSeed()
	return seed, ManualSeedAll(seed, devs...)
}

// StateAll returns the states of the devices' default generators, in device
// order (torch.cuda.get_rng_state_all).
func StateAll(devs ...*device.Device) ([][StateSize]byte, error) {
	devs, err := all("state", devs)
	if err != nil {
		return nil, err
	}
	states := make([][StateSize]byte, len(devs))
	for i, d := range devs {
		states[i] = Default(d).State()
	}
	return states, nil
}

// SetStateAll sets the states of the devices' default generators, one for each
// device, or none if it fails (torch.cuda.set_rng_state_all).
func SetStateAll(states [][StateSize]byte, devs ...*device.Device) error {
	devs, err := all("set state", devs)
	if err != nil {
		return err
	}
	if len(states) != len(devs) {
		return fmt.Errorf("rng: set state of %d devices: got %d states", len(devs), len(states))
	}
	for i := range states {
		if _, _, err := decode(states[i][:]); err != nil {
			return fmt.Errorf("rng: set state of %s: %w", devs[i], err)
		}
	}
	for i, d := range devs {
		if err := Default(d).SetState(states[i][:]); err != nil {
			return err
		}
	}
	return nil
}

func all(op string, devs []*device.Device) ([]*device.Device, error) {
	if len(devs) == 0 {
		d, err := device.All()
		if err != nil {
			return nil, fmt.Errorf("rng: %s of all devices: %w", op, err)
		}
		return d, nil
	}
	for i, d := range devs {
		if d == nil {
			return nil, fmt.Errorf("rng: %s: device %d of %d is nil", op, i, len(devs))
		}
	}
	return devs, nil
}

// A position is the position of a generator within a captured function.
type position struct {
	fixed  bool   // every launch uses this seed and offset
	seed   uint64 // if fixed
	offset uint64 // relative to the generator's offset at the launch, unless fixed
}

// mark identifies the state of a position that is not fixed, because offsets are
// multiples of 4. Such a state contains the serial number of the capture instead
// of the seed.
const mark = 3

// move moves to a fixed position: in the graph that the calling goroutine captures, or immediately.
func (g *Generator) move(p position) {
	if c := g.capturing(); c != nil {
		c.move(p)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seed, g.offset = p.seed, p.offset
}

// position returns the position in the graph that the calling goroutine captures,
// if any.
func (g *Generator) position() (position, bool) {
	c := g.capturing()
	if c == nil {
		return position{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, true
}

// capturing returns the draws from g of the calling goroutine's capture, or nil
// if the goroutine does not capture.
func (g *Generator) capturing() *captured {
	if g.dev == nil {
		return nil
	}
	open := gpu.CaptureOf(gpu.DeviceOf(g.dev).System())
	if open == nil {
		return nil
	}
	c, _ := g.captured(open.Stream, open.ID) // the end of a capture that was invalidated says so
	return c
}

func (c *captured) move(p position) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = p
}

func (c *captured) state() [StateSize]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now.fixed {
		return encode(c.now.seed, c.now.offset)
	}
	return encode(c.serial, c.now.offset|mark)
}

// draw advances the position and returns the start of a fill's numbers.
func (c *captured) draw(increment uint64) (place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := place{c.now.seed, c.now.offset, kernel.Address(0)}
	if !c.now.fixed {
		if err := c.locate(); err != nil {
			return place{}, err
		}
		p.launch = kernel.Address(c.at)
	}
	c.now.offset += increment
	return p, nil
}

// locate allocates the memory for seed and offset at the first use. c.mu is held.
func (c *captured) locate() error {
	if c.at != 0 {
		return nil
	}
	p := placesOf(c.gen.dev)
	s, err := p.stream()
	if err != nil {
		return err
	}
	if !gpu.StreamOf(s).Retain() {
		return gpu.CheckStream("rng", s, nil)
	}
	if c.at, err = p.alloc(s); err != nil {
		return errors.Join(err, gpu.StreamOf(s).Release())
	}
	c.places, c.last = p, s
	return nil
}

// launch moves the generator to its position after a launch of the graph, and
// returns the previous position.
func (g *Generator) launch(end position) (seed, offset uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	seed, offset = g.seed, g.offset
	if end.fixed {
		g.seed, g.offset = end.seed, end.offset
	} else {
		g.offset += end.offset
	}
	return seed, offset
}

// philox is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3"): four random words for a counter and a key.
//
//go:norace
func philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	c0, c1, c2, c3 := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range 10 {
		p, q := 0xD2511F53*uint64(c0), 0xCD9E8D57*uint64(c2)
		c0, c1, c2, c3 = uint32(q>>32)^c1^k0, uint32(q), uint32(p>>32)^c3^k1, uint32(p)
		k0 += 0x9E3779B9
		k1 += 0xBB67AE85
	}
	return [4]uint32{c0, c1, c2, c3}
}

// words returns the nth draw of a thread.
//
//go:norace
func words(seed, offset uint64, thread uint32, nth int) [4]uint32 {
	n := offset/4 + uint64(nth)
	return philox([4]uint32{uint32(n), uint32(n >> 32), thread, 0}, [2]uint32{uint32(seed), uint32(seed >> 32)})
}

// unit32 returns a value in (0, 1], the middle of one of 2^32 intervals within
// the precision of float32. The sum is rounded once, as in rng.cu.
func unit32(x uint32) float32 { return float32(float64(float32(x))*0x1p-32 + 0x1p-33) }

// unit64 returns a value in (0, 1], the middle of one of 2^53 intervals.
func unit64(x, y uint32) float64 { return float64(mix(x, y))*0x1p-53 + 0x1p-54 }

// mix returns 53 random bits.
func mix(x, y uint32) uint64 { return uint64(x) ^ uint64(y)<<21 }
