package ddp

import (
	"fmt"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// ReducerConfig are the options of NewReducer; nil means their defaults. They
// must be the same on all ranks.
type ReducerConfig struct {
	// BucketBytes is the most bytes of gradients that are reduced together. A larger
	// gradient gets a bucket for itself. Default 25 MiB, as in torch's
	// DistributedDataParallel.
	BucketBytes int
	// FirstBucketBytes is BucketBytes for the bucket that is ready first.
	// Default 1 MiB.
	FirstBucketBytes int
	// Op is the reduction. Default Avg, the mean over the ranks; use Sum when
	// each rank has weighted its gradients already, as ranks with unequal parts
	// of a batch must.
	Op *comm.Op
	// FindUnused lets a rank leave gradients out of a step (find_unused_parameters).
	// A gradient that is not Ready by Finish counts as zeros. If no rank used a
	// gradient, it keeps its value; if any rank used it, all ranks get the result. A
	// small reduction at the end of each step tells the devices, and the host does not
	// wait. Only for Sum and Avg. Default off: Finish returns an error for such a
	// gradient.
	FindUnused bool
	// StaticGraph is FindUnused for programs that use the same gradients in every step
	// (static_graph). The gradients may differ from rank to rank. The first step tells
	// which are used; Ready or Finish returns an error for a later step that differs.
	StaticGraph bool
	// Compress is the type of float32 and float64 gradients on the wire:
	// memory.Float16 or memory.BFloat16 (fp16_compress_hook, bf16_compress_hook).
	// Avg divides before the conversion, so that sums stay in the range of a float16.
	// Default none.
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
		return c, fmt.Errorf("ddp: new reducer: %w", err)
	}
	if c.Op == nil {
		c.Op = new(comm.Avg)
	}
	t := memory.DTypeOf[T]()
	if c.Compress == t {
		c.Compress = memory.Invalid
	}
	unused := c.FindUnused || c.StaticGraph
	switch {
	case unused && (*c.Op == comm.Prod || *c.Op == comm.Max || *c.Op == comm.Min):
		return c, fmt.Errorf("ddp: new reducer: %v with unused gradients: the zeros that stand for them need sum or avg", *c.Op)
	case unused && (!element.IsFloat(t) || element.IsFloat8(t)):
		return c, fmt.Errorf("ddp: new reducer: unused gradients of %s: want floats of 16 bits or more", t)
	case c.Compress == memory.Invalid:
		return c, nil
	case c.Compress != memory.Float16 && c.Compress != memory.BFloat16:
		return c, fmt.Errorf("ddp: new reducer: gradients reduced in %s: want memory.Float16 or memory.BFloat16", c.Compress)
	case t != memory.Float32 && t != memory.Float64:
		return c, fmt.Errorf("ddp: new reducer: gradients of %s reduced in %s: want float32 or float64", t, c.Compress)
	case *c.Op > comm.Avg:
		return c, fmt.Errorf("ddp: new reducer: gradients reduced in %s by %v: a factor of another type: want sum, avg, max, min or prod", c.Compress, *c.Op)
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
