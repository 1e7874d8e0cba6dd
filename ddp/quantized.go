package ddp

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Quantized is a [Hook] that sends gradients as 8-bit numbers in blocks of 32, by
// [comm.AllReduceQuantized], which has the bounds of the errors. A gradient of bfloat16 takes 0.52 of its
// bytes, and one of float32 0.26. The zero Quantized has 8-bit floats with error feedback. It keeps its
// memory in the buckets, so one value serves any number of reducers; it must not change while they
// are open.
//
// Each rank keeps the rounding errors of a step, and adds them to its gradients in the next one: those of
// what it sends, and in the elements whose sums it computes, those of the sums. So the updates of all
// steps together miss only the errors of the last step. They take 4 bytes for each element of a bucket on
// each rank. An infinite or NaN gradient makes its block of 32 elements NaN on all ranks, and leaves no trace
// in the errors of that block. Gradients of one bucket share blocks where they meet.
//
// Buckets of float64 are all-reduced as they are. The host waits for nothing. A graph can capture a step
// after the first one. Errors are not part of checkpoints: after a restart they begin with zeros.
// torch's quantization_pertensor_hook, the nearest one, sends all gradients to all ranks and has no error feedback.
type Quantized struct {
	// Format is the type of the 8-bit numbers: memory.Float8E4M3, which is the default, or
	// memory.Int8.
	Format memory.DType
	// NoErrorFeedback drops the errors of each step.
	NoErrorFeedback bool
}

var _ Hook = (*Quantized)(nil)

func (q *Quantized) check() error {
	if q == nil {
		return errors.New("the hook is a nil *Quantized: give &Quantized{}, or no hook for an all-reduce")
	}
	if f := q.format(); f != memory.Float8E4M3 && f != memory.Int8 {
		return fmt.Errorf("Quantized in %s: want %s or %s", f, memory.Float8E4M3, memory.Int8)
	}
	return nil
}

func (q *Quantized) format() memory.DType {
	if q.Format == memory.Invalid {
		return memory.Float8E4M3
	}
	return q.Format
}

// String returns the options, which must be the same on all ranks.
func (q *Quantized) String() string {
	return fmt.Sprintf("Quantized in %s, without error feedback %v", q.format(), q.NoErrorFeedback)
}

// Reduce implements [Hook].
func (q *Quantized) Reduce(b *Bucket) ([]tensor.Tensor, error) {
	switch b.Flat[0].DType() {
	case memory.Float16:
		return nil, reduceQuantized[memory.Float16Bits](q, b)
	case memory.BFloat16:
		return nil, reduceQuantized[memory.BFloat16Bits](q, b)
	case memory.Float32:
		return nil, reduceQuantized[float32](q, b)
	}
	return nil, b.AllReduce()
}

// reduceQuantized reduces a bucket, whose state is the errors.
func reduceQuantized[T memory.Element](q *Quantized, b *Bucket) error {
	cfg := comm.QuantizedConfig{Format: q.format()}
	flats := make(comm.Shards[T], len(b.Flat))
	for i, x := range b.Flat {
		var err error
		if flats[i], err = tensor.Slice[T](x); err != nil {
			return err
		}
	}
	if !q.NoErrorFeedback && b.Group.Size() > 1 {
		if b.State == nil {
			errs, err := zeroedErrors(b)
			if err != nil {
				return err
			}
			b.State = errs
		}
		cfg.Errors = b.State.(comm.Shards[float32])
	}
	return comm.AllReduceQuantized(b.Group, comm.Sum, flats, &cfg)
}

// zeroedErrors allocates the errors of a bucket.
func zeroedErrors(b *Bucket) (comm.Shards[float32], error) {
	var errs comm.Shards[float32]
	for i, x := range b.Flat {
		e, err := zeroed[float32](b.Group.Stream(i), x.Len())
		if err != nil {
			return nil, errors.Join(err, errs.Close())
		}
		errs = append(errs, e)
	}
	return errs, nil
}
