package kernels

import (
	_ "embed"
	"errors"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed flash.cu
var flashSource string

// flash has the kernels of attention by tensor cores. Those of kernels.cu serve the other sizes and types.
type flash[T Float] struct {
	module *kernel.Module
	along  floats // the products of rows of o with their gradients

	forward *kernel.Func[flashArgs[T]]
	queries *kernel.Func[flashQueriesArgs[T]]
	keys    *kernel.Func[flashKeysArgs[T]]
}

const flashThreads = 128

type flashArgs[T Float] struct {
	QKV, O         memory.Slice[T]
	LSE            floats
	Context, Heads int32
}

type flashQueriesArgs[T Float] struct {
	QKV, O, DOut   memory.Slice[T]
	LSE, Along     floats
	DQKV           memory.Slice[T]
	Context, Heads int32
}

type flashKeysArgs[T Float] struct {
	QKV, DOut      memory.Slice[T]
	LSE, Along     floats
	DQKV           memory.Slice[T]
	Context, Heads int32
}

// flashes reports whether there are such kernels for the sizes and the type, and for the major number of a
// device's compute capability.
func flashes[T Float](z Sizes, capability int) bool {
	return capability >= 8 && memory.DTypeOf[T]() == memory.BFloat16 && z.head() == 64 && z.Context%z.tile() == 0
}

// newFlash compiles the kernels.
func newFlash[T Float](s *stream.Stream, z Sizes, maxRows int) (f *flash[T], err error) {
	f = new(flash[T])
	if f.along, err = memory.Make[float32](s, maxRows*z.Heads); err != nil {
		return f, err
	}
	f.module, err = kernel.Compile(s.Device(), f.define(z))
	return f, err
}

func (f *flash[T]) define(z Sizes) *kernel.Source {
	src := &kernel.Source{Name: "flash.cu", CUDA: flashSource}
	host := standIn[T]{z}
	f.forward = kernel.Define(src, "flash", func(c *kernel.Call, p flashArgs[T]) {
		host.attention(c, attentionArgs[T]{p.QKV, p.O, p.LSE})
	})
	f.queries = kernel.Define(src, "flash_queries", func(c *kernel.Call, p flashQueriesArgs[T]) {
		along, o, g := kernel.Data(c, p.Along), wide(kernel.Data(c, p.O)), wide(kernel.Data(c, p.DOut))
		host.eachHeadGradient(c, p.QKV, p.DOut, p.LSE, func(head, row, column int) []float32 {
			at := along[head*z.Context:][:z.Context]
			copy(at, alongOf(host.part(o, row, column, z.Width), host.part(g, row, column, z.Width)))
			return at
		}, func(row, column int, dq, _, _ matrix) {
			set(kernel.Data(c, p.DQKV), row, column, 3*z.Width, dq)
		})
	})
	f.keys = kernel.Define(src, "flash_keys", func(c *kernel.Call, p flashKeysArgs[T]) {
		along := kernel.Data(c, p.Along)
		host.eachHeadGradient(c, p.QKV, p.DOut, p.LSE, func(head, _, _ int) []float32 {
			return along[head*z.Context:][:z.Context]
		}, func(row, column int, _, dk, dv matrix) {
			set(kernel.Data(c, p.DQKV), row, z.Width+column, 3*z.Width, dk)
			set(kernel.Data(c, p.DQKV), row, 2*z.Width+column, 3*z.Width, dv)
		})
	})
	return src
}

// grid has a column of tiles for each sequence and head.
func (f *flash[T]) grid(z Sizes, rows int) kernel.Grid {
	g := grid(z.Context/z.tile(), flashThreads)
	g.Blocks[1] = uint32(rows / z.Context * z.Heads)
	return g
}

func (f *flash[T]) attention(s *stream.Stream, z Sizes, qkv, o memory.Slice[T], lse floats) error {
	return f.forward.Launch(s, f.grid(z, o.Len()/z.Width), flashArgs[T]{qkv, o, lse, int32(z.Context), int32(z.Heads)})
}

func (f *flash[T]) attentionBack(s *stream.Stream, z Sizes, qkv, o, do memory.Slice[T], lse floats, dqkv memory.Slice[T]) error {
	g, along := f.grid(z, do.Len()/z.Width), f.along.Slice(0, lse.Len())
	if err := f.queries.Launch(s, g, flashQueriesArgs[T]{qkv, o, do, lse, along, dqkv, int32(z.Context), int32(z.Heads)}); err != nil {
		return err
	}
	return f.keys.Launch(s, g, flashKeysArgs[T]{qkv, do, lse, along, dqkv, int32(z.Context), int32(z.Heads)})
}

func (f *flash[T]) close() error {
	if f == nil {
		return nil
	}
	errs := []error{f.along.Close()}
	if f.module != nil {
		errs = append(errs, f.module.Close())
	}
	return errors.Join(errs...)
}
