package graph

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// CallableConfig are the options of NewCallable; nil means the defaults.
type CallableConfig struct {
	Config
	// Warmup is how often the work runs before it is captured. Default 3, as in torch; a
	// negative value means no warm-up. The results of the warm-up stay.
	Warmup int
}

// A Callable is work that was captured once, with inputs that each call copies in
// (torch.cuda.make_graphed_callables, without gradients).
type Callable[T memory.Element] struct {
	mu     sync.Mutex // keeps the copies and the launch of one call together
	exec   *Exec
	side   *stream.Stream // keeps the stream's resources of other packages
	inputs []memory.Slice[T]
}

// NewCallable runs fn several times on a separate stream, so that all resources that are
// created on first use exist, and then captures it there. fn gets that stream and enqueues
// its work on it; it reads its inputs from the slices inputs and writes to its own slices.
// The warm-up runs after the operations that are already enqueued on s, and operations
// that are enqueued on s later run after the warm-up. All memory that fn uses must be
// allocated before, and stay open as long as the Callable.
func NewCallable[T memory.Element](s *stream.Stream, inputs []memory.Slice[T], fn func(s *stream.Stream) error, cfg *CallableConfig) (call *Callable[T], err error) {
	c := CallableConfig{Warmup: 3}
	if cfg != nil {
		c.Config = cfg.Config
		if cfg.Warmup != 0 {
			c.Warmup = cfg.Warmup
		}
	}
	const op = "graph: new callable"
	if fn == nil {
		return nil, fmt.Errorf("%s: no function given", op)
	}
	if s == nil || !gpu.StreamOf(s).Open() {
		return nil, gpu.CheckStream(op, s, nil)
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "captures do not nest"); err != nil {
		return nil, err
	}
	for i, x := range inputs {
		if err := inside.CheckBuffer(op, x.Buffer(), x.Len(), s.Device()); err != nil {
			return nil, fmt.Errorf("%w (input %d)", err, i)
		}
	}
	side, err := stream.New(s.Device(), nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		if call == nil { // fn may also have panicked
			err = errors.Join(err, side.Close())
		}
	}()
	x, err := warmAndCapture(s, side, fn, &c)
	if err != nil {
		return nil, err
	}
	return &Callable[T]{exec: x, side: side, inputs: slices.Clone(inputs)}, nil
}

func warmAndCapture(s, side *stream.Stream, fn func(s *stream.Stream) error, c *CallableConfig) (*Exec, error) {
	if err := side.WaitStream(s); err != nil {
		return nil, err
	}
	for range c.Warmup {
		if err := fn(side); err != nil {
			return nil, fmt.Errorf("graph: warm up: %w", err)
		}
	}
	if err := s.WaitStream(side); err != nil {
		return nil, err
	}
	return Capture([]*stream.Stream{side}, func() error { return fn(side) }, &c.Config)
}

// Call copies each of inputs to the corresponding slice of NewCallable, unless it is that
// slice, and launches the graph, all on s. The outputs are in the slices that fn writes
// to, until the next call overwrites them. Several goroutines may call it if they use one
// stream; with different streams, the copies of one call could overtake the other's
// launch.
func (c *Callable[T]) Call(s *stream.Stream, inputs ...memory.Slice[T]) error {
	const op = "graph: call"
	if c == nil {
		return fmt.Errorf("%s: no callable given", op)
	}
	if err := c.exec.check(op); err != nil {
		return err
	}
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "graphs do not nest"); err != nil {
		return err
	}
	if len(inputs) != len(c.inputs) {
		return fmt.Errorf("%s %s: %d inputs: want %d", op, c.exec, len(inputs), len(c.inputs))
	}
	for i, x := range inputs {
		if x.Len() != c.inputs[i].Len() {
			return fmt.Errorf("%s %s: input %d has %d elements: want %d", op, c.exec, i, x.Len(), c.inputs[i].Len())
		}
		if err := inside.CheckBuffer(op, x.Buffer(), x.Len(), nil); err != nil {
			return fmt.Errorf("%w (input %d)", err, i)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, x := range inputs {
		if x.Ptr() == c.inputs[i].Ptr() {
			continue
		}
		if err := memory.Copy(s, c.inputs[i], x); err != nil {
			return err
		}
	}
	return c.exec.Launch(s)
}

// Close closes the graph. It is idempotent.
func (c *Callable[T]) Close() error {
	if c == nil {
		return nil
	}
	return errors.Join(c.exec.Close(), c.side.Close())
}
