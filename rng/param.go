package rng

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Param is the type of a parameter for elements of T: one number for all elements, or a slice of
// floating-point numbers in device memory. A slice has a number for each element, or one number
// for all elements. The fill reads it when the stream reaches the fill. The package documentation says
// when a slice may share memory with the filled slice.
type Param[T memory.Element] interface {
	int | float64 | memory.Slice[T] | // if T is Float
		memory.Slice[memory.Float16Bits] | memory.Slice[memory.BFloat16Bits] | memory.Slice[float32] | memory.Slice[float64]
}

// A param is a number or a slice.
type param struct {
	number float64
	at     kernel.Arg
	dtype  memory.DType // of the slice; Invalid for a number
	n      int
	ptr    uint64
	buffer *memory.Buffer
}

func (p *param) isSlice() bool { return p.dtype != memory.Invalid }

func paramOf[T memory.Element, P Param[T]](v P) param {
	switch v := any(v).(type) {
	case int:
		return param{number: float64(v), at: kernel.Address(0)}
	case float64:
		return param{number: v, at: kernel.Address(0)}
	case memory.Slice[memory.Float16Bits]:
		return sliceParam(v)
	case memory.Slice[memory.BFloat16Bits]:
		return sliceParam(v)
	case memory.Slice[float32]:
		return sliceParam(v)
	case memory.Slice[float64]:
		return sliceParam(v)
	}
	return sliceParam(any(v).(memory.Slice[T])) // not of floating-point numbers: check returns an error
}

func sliceParam[T memory.Element](x memory.Slice[T]) param {
	return param{at: kernel.Ptr(x), dtype: memory.DTypeOf[T](), n: x.Len(), ptr: x.Ptr(), buffer: x.Buffer()}
}

// check validates a slice as the parameter of a fill of out on a device. inPlace says whether the
// slice may be out itself.
func (p *param) check(op, name string, out region, inPlace bool, dev *device.Device) error {
	if !p.isSlice() {
		return nil
	}
	if !formats[p.dtype].IsFloat() {
		return fmt.Errorf("%s: %s is a slice of %s: want a slice of floating-point numbers", op, name, p.dtype)
	}
	if p.n != out.n && p.n != 1 {
		return fmt.Errorf("%s: %s has %d elements: want 1, or %d as the result", op, name, p.n, out.n)
	}
	if err := inside.CheckBuffer(op, p.buffer, p.n, dev); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return apart(op, region{name, p.dtype, p.ptr, p.n}, out, inPlace)
}

// step returns the distance of the numbers of adjacent elements.
func (p *param) step() int32 {
	if p.isSlice() && p.n != 1 {
		return 1
	}
	return 0
}

// paramTypes are the four arguments of a kernel that are a parameter.
var paramTypes = []kernel.Param{kernel.Pointer, kernel.F64, kernel.I32, kernel.I32}

func (p *param) type32() kernel.Arg { return kernel.Scalar(int32(p.dtype)) }

// A hostParam is a parameter in a stand-in.
type hostParam struct {
	at     func(i int) float64
	dtype  memory.DType
	number bool
}

// readParam reads the parameter of n elements from argument i and the next three.
func readParam(c *kernel.Call, i, n int) hostParam {
	p := hostParam{dtype: memory.DType(kernel.Get[int32](c, i+2))}
	step := int(kernel.Get[int32](c, i+3))
	if step == 0 {
		n = 1
	}
	switch {
	case c.Address(i) == 0:
		v := kernel.Get[float64](c, i+1)
		p.number, p.at = true, func(int) float64 { return v }
	case p.dtype == memory.Float16:
		x := kernel.Read[memory.Float16Bits](c, i, n)
		p.at = func(k int) float64 { return fromHalf(x[k*step]) }
	case p.dtype == memory.BFloat16:
		x := kernel.Read[memory.BFloat16Bits](c, i, n)
		p.at = func(k int) float64 { return fromBFloat(x[k*step]) }
	case p.dtype == memory.Float32:
		x := kernel.Read[float32](c, i, n)
		p.at = func(k int) float64 { return float64(x[k*step]) }
	default:
		x := kernel.Read[float64](c, i, n)
		p.at = func(k int) float64 { return x[k*step] }
	}
	return p
}

// placeBytes is the size of a place: seed and offset.
const placeBytes = 16

// places allocates the places of a device's launches. Prepare writes a place
// before the graph runs. The memory must not be a block that the captured
// function has used and closed, because captured operations before the fill would
// overwrite the place in each launch. Therefore places use neither the pool of
// the capture nor a captured stream.
type places struct {
	dev  *device.Device
	pool *memory.Pool

	mu sync.Mutex
	s  *stream.Stream // stream of allocations and frees; nil before the first
}

var placesKey handle.Key

// allPlaces holds the places of a System, which closes them.
type allPlaces struct {
	mu   sync.Mutex
	list map[*device.Device]*places
}

func placesOf(dev *device.Device) *places {
	all := gpu.DeviceOf(dev).System().Local(&placesKey, func() any { return &allPlaces{list: map[*device.Device]*places{}} }).(*allPlaces)
	all.mu.Lock()
	defer all.mu.Unlock()
	p := all.list[dev]
	if p == nil {
		var private memory.PoolConfig
		inside.MakePrivate(&private)
		p = &places{dev: dev, pool: memory.NewPool(&private)}
		all.list[dev] = p
	}
	return p
}

// Close closes the streams, but not the pools, whose memory package memory,
// which the System closes next, returns to the driver.
func (a *allPlaces) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, p := range a.list {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

func (p *places) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.s.Close(); p.dev.Err() == nil { // a lost device cannot destroy streams, and has reported its error
		return err
	}
	return nil
}

// stream returns the stream of the places.
func (p *places) stream() (*stream.Stream, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.s != nil {
		return p.s, nil
	}
	s, err := stream.New(p.dev, nil)
	if err != nil {
		return nil, err
	}
	handle.InitForever(&gpu.StreamOf(s).Owner) // close closes it, and devices may be dropped without Close
	p.s = s
	return s, nil
}

// alloc returns the address of a place for work on s, the stream of the places.
func (p *places) alloc(s *stream.Stream) (at uint64, err error) {
	err = p.pool.Use(s, func() (err error) {
		at, err = memory.AllocRaw(s, placeBytes)
		return err
	})
	return at, err
}

// free frees a place that last, the stream of the last launch, may still read.
func (p *places) free(at uint64, last *stream.Stream) {
	if memory.RecordStreamRaw(at, last) != nil {
		_ = gpu.StreamOf(p.s).Follow(gpu.StreamOf(last)) // last is closed, so it is not captured
	}
	_ = memory.FreeRaw(p.dev, at) // fails only on a lost device, which reports its own error
}

// A place is the start of a fill's numbers. If launch points to the place of a
// graph's launch, seed is unused, and offset is relative to that place.
type place struct {
	seed, offset uint64
	launch       kernel.Arg
}

// draw advances the generator and returns its previous place. If s is being
// captured, each launch advances it.
func (g *Generator) draw(s *stream.Stream, increment uint64) (place, error) {
	id, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return place{}, err
	}
	if id == 0 {
		seed, offset := g.take(increment)
		return place{seed, offset, kernel.Address(0)}, nil
	}
	c, err := g.captured(gpu.StreamOf(s), id)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	p, err := c.draw(increment)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	return p, nil
}

// captured holds the draws of one capture from one generator. It owns the device
// memory with the place of the current launch, which the graph's kernels read.
type captured struct {
	gen    *Generator
	id     uint64
	serial uint64 // unique

	mu      sync.Mutex // guards the fields below; held from Prepare to Launched
	now     position   // current position in the captured function; final position after it
	at      uint64     // address of seed and offset of the launch, or 0 if no fill needs them
	places  *places    // allocator of at
	holders int
	host    [2]uint64
	last    *stream.Stream // stream of the previous launch, or of the allocation of at
}

// captured returns the draws of the capture of s from g, and creates them at the
// first call. If the capture is invalid, it returns an error and an object that
// no graph uses.
func (g *Generator) captured(s *gpu.Stream, id uint64) (*captured, error) {
	g.mu.Lock()
	c := g.captures[id]
	g.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c = &captured{gen: g, id: id, serial: serials.Add(1)}
	g.mu.Lock()
	if other := g.captures[id]; other != nil { // created by another goroutine
		g.mu.Unlock()
		return other, nil
	}
	if g.captures == nil {
		g.captures = map[uint64]*captured{}
	}
	g.captures[id] = c
	g.mu.Unlock()
	err := s.Captured(c)
	if err != nil { // no graph owns it
		c.drop()
	}
	return c, err
}

var serials atomic.Uint64

// Hold adds a reference of a graph.
func (c *captured) Hold(gpu.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders++
}

// LetGo releases a reference of a graph.
func (c *captured) LetGo(gpu.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders--; c.holders > 0 {
		return
	}
	c.drop()
	if c.at != 0 {
		c.places.free(c.at, c.last)
		c.at = 0
	}
	c.forget()
}

// drop removes c from its generator.
func (c *captured) drop() {
	c.gen.mu.Lock()
	defer c.gen.mu.Unlock()
	delete(c.gen.captures, c.id)
}

// Prepare draws the numbers of a launch on s, and enqueues a copy of their place
// before the launch.
func (c *captured) Prepare(x gpu.HasStream) error {
	s := x.(*stream.Stream)
	if !gpu.StreamOf(s).Retain() { // until the next launch has waited for it
		return gpu.CheckStream("rng", s, nil)
	}
	c.mu.Lock()
	if err := c.write(s); err != nil {
		c.mu.Unlock()
		return fmt.Errorf("rng: %w", errors.Join(err, gpu.StreamOf(s).Release()))
	}
	return nil
}

// Launched completes the launch that Prepare started.
func (c *captured) Launched(s gpu.HasStream, _ error) {
	c.forget()
	c.last = s.(*stream.Stream)
	c.mu.Unlock()
}

var _ gpu.Preparer = (*captured)(nil)

// forget releases the stream of the last launch.
func (c *captured) forget() {
	if c.last != nil {
		_ = gpu.StreamOf(c.last).Release() // its own user gets its errors
	}
	c.last = nil
}

func (c *captured) write(s *stream.Stream) error {
	if c.at == 0 {
		c.gen.launch(c.now)
		return nil
	}
	// The previous launch must have read its place.
	if c.last != s {
		if err := follow(s, c.last); err != nil {
			return err
		}
	}
	on := s
	if s.Device() != c.gen.dev { // a copy needs a stream of the device
		var err error
		if on, err = c.places.stream(); err != nil {
			return err
		}
		if err := gpu.StreamOf(on).Follow(gpu.StreamOf(s)); err != nil {
			return err
		}
	}
	c.host[0], c.host[1] = c.gen.launch(c.now)
	err := gpu.DeviceOf(on.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(cudadrv.DevicePtr(c.at), unsafe.Pointer(&c.host), unsafe.Sizeof(c.host), gpu.StreamOf(on).Raw())
	})
	if on != s {
		err = errors.Join(err, gpu.StreamOf(s).Follow(gpu.StreamOf(on)))
	}
	return err
}

// follow orders s after o, or fails if another graph captures o, because the
// wait would become part of that graph.
func follow(s, o *stream.Stream) error {
	if err := gpu.StreamOf(o).RefuseCapture("launch a graph", "a launch uses it too: launch the graph after the capture"); err != nil {
		return err
	}
	return gpu.StreamOf(s).Follow(gpu.StreamOf(o))
}
