package comm

import (
	"fmt"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// ReducerConfig are the options of NewReducer; nil means their defaults. They
// must be the same on all ranks.
type ReducerConfig struct {
	// BucketBytes is how many bytes of gradients are reduced together at most;
	// a larger gradient has a bucket of its own. Default 25 MiB, as in torch's
	// DistributedDataParallel.
	BucketBytes int
	// FirstBucketBytes is BucketBytes for the bucket that is ready first.
	// Default 1 MiB.
	FirstBucketBytes int
	// Op is the reduction. Default Avg, the mean over the ranks; use Sum when
	// each rank has weighted its gradients already, as ranks with unequal parts
	// of a batch must.
	Op *Op
	// FindUnused lets a rank leave gradients out of a step: those that are not
	// Ready by Finish count as zeros, and what was in them is not used. A gradient
	// that no rank used keeps what it had; one that any rank used gets the result
	// on all ranks. The ranks find it out by a small reduction at the end of each
	// step, and the device decides: the host waits for nothing. Only for Sum and
	// Avg (find_unused_parameters). Default off: such a gradient is an error of
	// Finish.
	FindUnused bool
	// StaticGraph is FindUnused for programs that use the same gradients in every
	// step, which may differ from rank to rank: they are found out in the first
	// step, and one that behaves otherwise later is an error of Ready or Finish
	// (static_graph).
	StaticGraph bool
	// Compress is the type in which float32 and float64 gradients are reduced:
	// memory.Float16T or memory.BFloat16T, which are half as many bytes or fewer.
	// Avg divides before the conversion, so that sums stay in the range of a
	// float16 (fp16_compress_hook, bf16_compress_hook). Default none.
	Compress memory.DType
}

// filled checks the options and puts in the defaults.
func filled[T memory.Element](cfg *ReducerConfig) (ReducerConfig, error) {
	c := ReducerConfig{}
	if cfg != nil {
		c = *cfg
	}
	var err error
	if c.BucketBytes, c.FirstBucketBytes, err = bucketSizes(c.BucketBytes, c.FirstBucketBytes); err != nil {
		return c, fmt.Errorf("comm: new reducer: %w", err)
	}
	if c.Op == nil {
		c.Op = new(Avg)
	}
	t := memory.DTypeOf[T]()
	if c.Compress == t {
		c.Compress = memory.Invalid
	}
	unused := c.FindUnused || c.StaticGraph
	switch {
	case unused && (*c.Op == Prod || *c.Op == Max || *c.Op == Min):
		return c, fmt.Errorf("comm: new reducer: %v with unused gradients: the zeros that stand for them need sum or avg", *c.Op)
	case unused && (!element.IsFloat(t) || element.IsFloat8(t)):
		return c, fmt.Errorf("comm: new reducer: unused gradients of %s: want floats of 16 bits or more", t)
	case c.Compress == memory.Invalid:
		return c, nil
	case c.Compress != memory.Float16T && c.Compress != memory.BFloat16T:
		return c, fmt.Errorf("comm: new reducer: gradients reduced in %s: want memory.Float16T or memory.BFloat16T", c.Compress)
	case t != memory.Float32 && t != memory.Float64:
		return c, fmt.Errorf("comm: new reducer: gradients of %s reduced in %s: want float32 or float64", t, c.Compress)
	case *c.Op > Avg:
		return c, fmt.Errorf("comm: new reducer: gradients reduced in %s by %v: a factor of another type: want sum, avg, max, min or prod", c.Compress, *c.Op)
	}
	return c, nil
}

// bucketSizes puts in the defaults.
func bucketSizes(bytes, first int) (int, int, error) {
	if bytes < 0 || first < 0 {
		return 0, 0, fmt.Errorf("buckets of %d and %d bytes: want a positive size", first, bytes)
	}
	if bytes == 0 {
		bytes = 25 << 20
	}
	if first == 0 {
		first = min(1<<20, bytes)
	}
	return bytes, first, nil
}
