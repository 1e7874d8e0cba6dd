package comm

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A bucketWire is the memory of a bucket that is reduced, on one local rank. Its
// methods enqueue.
type bucketWire[T memory.Element] interface {
	put(s *stream.Stream, at int, x memory.Slice[T]) error // x into it
	get(s *stream.Stream, at int, x memory.Slice[T]) error // x out of it
	zero(s *stream.Stream, at, n int) error
	// choose makes x what is in the wire where used is not 0, and old where it is.
	choose(s *stream.Stream, at int, x memory.Slice[T], used memory.Slice[uint8], old memory.Slice[T]) error
	reduce(m *member, op Op) error
	record(s *stream.Stream) error
	close() error
}

// newBucketWire makes a wire of n elements: the gradients' own memory where they lie
// in it as on the wire and go over it as they are.
func newBucketWire[T memory.Element](m *member, c *ReducerConfig, whole memory.Slice[T], n, ranks int) (bucketWire[T], error) {
	by := 1
	if *c.Op == Avg {
		by = ranks
	}
	switch {
	case c.Compress == memory.Float16T:
		return newNarrow[T, memory.Float16](m, n, by)
	case c.Compress == memory.BFloat16T:
		return newNarrow[T, memory.BFloat16](m, n, by)
	case whole.Buffer() != nil:
		return inPlace[T]{whole}, nil
	}
	flat, err := zeroed[T](m, n)
	return copied[T]{inPlace[T]{flat}}, err
}

// zeroed allocates a wire's memory. The gaps between gradients are reduced too:
// they must be numbers.
func zeroed[T memory.Element](m *member, n int) (memory.Slice[T], error) {
	x, err := memory.Make[T](m.stream, n)
	if err != nil {
		return x, err
	}
	if err := x.Zero(m.stream); err != nil {
		return x, errors.Join(err, x.Close())
	}
	return x, nil
}

// inPlace is a wire that is the gradients' own memory.
type inPlace[T memory.Element] struct{ flat memory.Slice[T] }

func (w inPlace[T]) put(*stream.Stream, int, memory.Slice[T]) error { return nil }

func (w inPlace[T]) get(*stream.Stream, int, memory.Slice[T]) error { return nil }

func (w inPlace[T]) zero(s *stream.Stream, at, n int) error { return w.flat.Slice(at, at+n).Zero(s) }

func (w inPlace[T]) choose(s *stream.Stream, at int, x memory.Slice[T], used memory.Slice[uint8], old memory.Slice[T]) error {
	return choose(s, x, used, w.flat.Slice(at, at+x.Len()), old)
}

func (w inPlace[T]) reduce(m *member, op Op) error {
	return nccl.AllReduce(m.comm, m.stream, w.flat, w.flat, op)
}

func (w inPlace[T]) record(s *stream.Stream) error { return w.flat.RecordStream(s) }

func (w inPlace[T]) close() error { return nil }

// copied is a wire of its own memory.
type copied[T memory.Element] struct{ inPlace[T] }

func (w copied[T]) put(s *stream.Stream, at int, x memory.Slice[T]) error {
	return memory.Copy(s, w.flat.Slice(at, at+x.Len()), x)
}

func (w copied[T]) get(s *stream.Stream, at int, x memory.Slice[T]) error {
	return memory.Copy(s, x, w.flat.Slice(at, at+x.Len()))
}

func (w copied[T]) close() error { return w.flat.Close() }

// narrow is a wire of a smaller type. The mean is taken on the way in, because
// the sum may be larger than that type can hold.
type narrow[T, W memory.Element] struct {
	flat memory.Slice[W]
	by   int // what gradients are divided by
}

func newNarrow[T, W memory.Element](m *member, n, by int) (bucketWire[T], error) {
	flat, err := zeroed[W](m, n)
	return narrow[T, W]{flat, by}, err
}

func (w narrow[T, W]) put(s *stream.Stream, at int, x memory.Slice[T]) error {
	return divide(s, w.flat.Slice(at, at+x.Len()), x, w.by)
}

func (w narrow[T, W]) get(s *stream.Stream, at int, x memory.Slice[T]) error {
	return divide(s, x, w.flat.Slice(at, at+x.Len()), 1)
}

func (w narrow[T, W]) zero(s *stream.Stream, at, n int) error { return w.flat.Slice(at, at+n).Zero(s) }

func (w narrow[T, W]) choose(s *stream.Stream, at int, x memory.Slice[T], used memory.Slice[uint8], old memory.Slice[T]) error {
	return choose(s, x, used, w.flat.Slice(at, at+x.Len()), old)
}

func (w narrow[T, W]) reduce(m *member, op Op) error {
	if op == Avg {
		op = Sum
	}
	return nccl.AllReduce(m.comm, m.stream, w.flat, w.flat, op)
}

func (w narrow[T, W]) record(s *stream.Stream) error { return w.flat.RecordStream(s) }

func (w narrow[T, W]) close() error { return w.flat.Close() }

// The kernels live as long as the process.
var (
	divider = sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise("x / by", &kernel.ElementwiseConfig{
			Inputs:   []string{"x"},
			Defaults: []kernel.Operand{kernel.Set("by", 1)},
			Floats:   func(in, out []float64) { out[0] = in[0] / in[1] },
		})
	})
	chooser = sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise("used != 0 ? reduced : old", &kernel.ElementwiseConfig{
			Inputs: []string{"used", "reduced", "old"},
			Floats: func(in, out []float64) {
				out[0] = in[2]
				if in[0] != 0 {
					out[0] = in[1]
				}
			},
		})
	})
)

// divide converts x/by to the type of dst, rounding once from the wider of the
// two.
func divide[D, S memory.Element](s *stream.Stream, dst memory.Slice[D], x memory.Slice[S], by int) error {
	f, err := divider()
	if err != nil {
		return err
	}
	if err := f.Launch(s, kernel.Out(dst), kernel.In(x), kernel.Set("by", by)); err != nil {
		return fmt.Errorf("comm: convert gradients: %w", err)
	}
	return nil
}

func choose[T, W memory.Element](s *stream.Stream, x memory.Slice[T], used memory.Slice[uint8], reduced memory.Slice[W], old memory.Slice[T]) error {
	f, err := chooser()
	if err != nil {
		return err
	}
	if err := f.Launch(s, kernel.Out(x), kernel.In(used), kernel.In(reduced), kernel.In(old)); err != nil {
		return fmt.Errorf("comm: keep unused gradients: %w", err)
	}
	return nil
}
