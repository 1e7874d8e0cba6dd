package comm

import (
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A staging is contiguous memory that a batch uses in place of tensors with other layouts.
type staging struct {
	stream *stream.Stream
	temp   tensor.Tensor   // owns the memory
	parts  []tensor.Tensor // of temp, with the shapes of given
	given  []tensor.Tensor // the caller's
	in     bool            // copy given to temp before the batch
	out    bool            // copy temp to given after it
}

// stage makes the staging of tensors of one type with n elements.
func stage(s *stream.Stream, given []tensor.Tensor, n int, in, out bool) (staging, error) {
	temp, err := tensor.Make(s, given[0].DType(), n)
	if err != nil {
		return staging{}, err
	}
	x := staging{stream: s, temp: temp, given: given, in: in, out: out}
	from := 0
	for _, t := range given {
		part, err := temp.Narrow(0, from, t.Len())
		if err == nil {
			part, err = part.View(t.Shape()...)
		}
		if err != nil {
			closeAll([]tensor.Tensor{temp})
			return staging{}, err
		}
		x.parts, from = append(x.parts, part), from+t.Len()
	}
	return x, nil
}

// copyIn enqueues the copies that precede the batch's operations.
func (b *Batch) copyIn() error {
	for i := range b.stagings {
		if x := &b.stagings[i]; x.in {
			if err := tensor.CopyAll(x.stream, x.parts, x.given); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyOut enqueues the copies that follow the batch's operations.
func (b *Batch) copyOut() error {
	for i := range b.stagings {
		if x := &b.stagings[i]; x.out {
			if err := tensor.CopyAll(x.stream, x.given, x.parts); err != nil {
				return err
			}
		}
	}
	return nil
}

// freeStagings frees the memory in the order of the streams.
func (b *Batch) freeStagings() {
	for i := range b.stagings {
		_ = b.stagings[i].temp.Close() // the memory is the batch's, so there is nothing to report
	}
	clear(b.stagings)
	b.stagings = b.stagings[:0]
}
