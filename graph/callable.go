package graph

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// CallableConfig are the options of NewCallable; nil means the defaults.
type CallableConfig struct {
	Config
	// Warmup is how often the work runs before it is captured. Default 3, as in
	// torch; negative is none. After a warm-up what it has computed stays.
	Warmup int
}

// A Callable is work that was captured once, with inputs that it copies in
// (torch.cuda.make_graphed_callables, without gradients).
type Callable[T memory.Element] struct {
	mu     sync.Mutex // keeps the copies of a call and its launch together
	exec   *Exec
	side   *stream.Stream // keeps what other packages made for it, such as cuBLAS's workspace
	inputs []memory.Slice[T]
}

// NewCallable runs fn some times on a stream of its own, which makes everything
// that exists from first use on, and then captures it there. fn is given that
// stream and enqueues its work on it; it reads its inputs from the slices inputs
// and writes to slices of its own. The work on s so far comes before, and what
// is enqueued on s later after the warm-up. What fn uses was allocated before,
// and stays open as long as the Callable.
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
	if !s.Open() {
		return nil, s.Check(op, nil)
	}
	if err := s.RefuseCapture(op, "captures do not nest"); err != nil {
		return nil, err
	}
	for i, x := range inputs {
		if err := x.Check(op, s.Device()); err != nil {
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
	return CaptureWith(&c.Config, []*stream.Stream{side}, func() error { return fn(side) })
}

// Call copies each of inputs to the slice of NewCallable, where it is not that
// itself, and launches the graph, all on s. The outputs are in the slices that
// fn writes to, until the next call overwrites them. Several goroutines may
// call; use one stream, or the copies of one call overtake the other's launch.
func (c *Callable[T]) Call(s *stream.Stream, inputs ...memory.Slice[T]) error {
	const op = "graph: call"
	if c == nil {
		return fmt.Errorf("%s: no callable given", op)
	}
	if err := c.exec.check(op); err != nil {
		return err
	}
	if err := s.Check(op, nil); err != nil {
		return err
	}
	if err := s.RefuseCapture(op, "graphs do not nest"); err != nil {
		return err
	}
	if len(inputs) != len(c.inputs) {
		return fmt.Errorf("%s %s: %d inputs: want %d", op, c.exec, len(inputs), len(c.inputs))
	}
	for i, x := range inputs {
		if x.Len() != c.inputs[i].Len() {
			return fmt.Errorf("%s %s: input %d has %d elements: want %d", op, c.exec, i, x.Len(), c.inputs[i].Len())
		}
		if err := x.Check(op, nil); err != nil {
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

// Exec returns the graph. It belongs to the Callable.
func (c *Callable[T]) Exec() *Exec { return c.exec }

// Close gives the graph up. It is idempotent.
func (c *Callable[T]) Close() error {
	if c == nil {
		return nil
	}
	return errors.Join(c.exec.Close(), c.side.Close())
}
