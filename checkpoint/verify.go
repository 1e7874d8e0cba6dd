package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"runtime"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/stream"
)

// Verify compares the SHA-256 of the rank's tensors on the device with the same parts of the
// files, which it reads by the page cache. The error names the tensor, its file and both
// digests. Verify cannot compare converted tensors: the error matches errors.ErrUnsupported.
// Several goroutines share the work.
func (c *Checkpoint) Verify(ctx context.Context, w *Weights) error {
	if w == nil {
		return errors.New("checkpoint: verify: no weights given")
	}
	if err := strided.Check("checkpoint: verify", w.slab, nil); err != nil {
		return err
	}
	s, err := stream.New(w.slab.Device(), nil)
	if err != nil {
		return fmt.Errorf("checkpoint: verify: %w", err)
	}
	// The weights may have outlived the stream that they were loaded on.
	if on := mem.BufferOf(w.slab.Buffer()).Stream; gpu.CheckStream("checkpoint: verify", on, nil) == nil {
		err = s.WaitStream(on)
	}
	if err == nil {
		err = each(ctx, w.Names(), func(ctx context.Context, name string) error { return c.verify(ctx, w, s, name) })
	}
	return errors.Join(err, s.Close())
}

// mostWorkers limits the memory of each: its functions have a buffer of verifyChunk bytes or two
// of half the size.
const mostWorkers = 16

// each calls fn for all items by as many goroutines as there are processors, at most
// mostWorkers, and returns the first error.
func each[T any](ctx context.Context, items []T, fn func(ctx context.Context, item T) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	todo := make(chan T)
	var all sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), mostWorkers, len(items)) {
		all.Go(func() {
			for item := range todo {
				if err := fn(ctx, item); err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, item := range items {
		if ctx.Err() != nil {
			break
		}
		todo <- item
	}
	close(todo)
	all.Wait()
	return context.Cause(ctx)
}

func (c *Checkpoint) verify(ctx context.Context, w *Weights, s *stream.Stream, name string) error {
	t := w.parts[name]
	info, ok := c.Info(name)
	fail := func(err error) error {
		return &TensorError{Op: "verify", Path: info.File, Tensor: name, Offset: -1, Err: err}
	}
	switch {
	case !ok || info.DType != t.info.DType || !slices.Equal(info.Shape, t.info.Shape):
		return fmt.Errorf("checkpoint: verify: the checkpoint has no tensor %q of type %s and shape %v", name, t.info.DType, t.info.Shape)
	case t.casts():
		return fail(fmt.Errorf("it was converted from %s to %s: %w", t.info.DType, t.to, errors.ErrUnsupported))
	}
	want, got := sha256.New(), sha256.New()
	if err := c.hashPart(ctx, want, name, &t.flat, w.rank); err != nil {
		return fail(err)
	}
	if err := w.hash(got, s, t); err != nil {
		return fail(err)
	}
	if x, y := hex.EncodeToString(got.Sum(nil)), hex.EncodeToString(want.Sum(nil)); x != y {
		return fail(fmt.Errorf("SHA-256 of the part of rank %d is %s on the device and %s in the file", w.rank, x, y))
	}
	return nil
}

// verifyChunk is how many bytes one step compares.
const verifyChunk = 8 << 20

// hash adds a part's bytes in device memory.
func (w *Weights) hash(h hash.Hash, s *stream.Stream, t *placed) error {
	host := make([]byte, min(verifyChunk, t.bytes(w.rank)))
	for at, end := t.at[w.rank], t.at[w.rank]+t.bytes(w.rank); at < end; at += len(host) {
		host = host[:min(len(host), end-at)]
		x, err := view(w.slab, at, len(host))
		if err != nil {
			return err
		}
		if err := x.CopyTo(s, host); err != nil {
			return err
		}
		h.Write(host)
	}
	return nil
}

// hashPart adds the bytes of a rank's part in the file: a run of each row.
func (c *Checkpoint) hashPart(ctx context.Context, h hash.Hash, name string, f *division, rank int) error {
	info, _ := c.Info(name)
	size := info.DType.Size()
	host := make([]byte, min(verifyChunk, f.ranges[rank].Len*size))
	for row := range f.outer {
		from := int64((row*f.width + f.ranges[rank].Start) * size)
		if err := c.hashRun(ctx, h, host, name, from, from+int64(f.ranges[rank].Len*size)); err != nil {
			return err
		}
	}
	return nil
}

// hashRun adds the bytes of a tensor from one offset to another, by way of host, whose length
// is a multiple of the size of elements.
func (c *Checkpoint) hashRun(ctx context.Context, h hash.Hash, host []byte, name string, from, to int64) error {
	for from < to {
		n := min(int64(len(host)), to-from)
		if err := c.read(ctx, name, host[:n], from); err != nil {
			return err
		}
		h.Write(host[:n])
		from += n
	}
	return nil
}

// read reads bytes of a tensor in row-major order. off and the length of p are multiples of
// the size of elements if the tensor is scattered.
func (c *Checkpoint) read(ctx context.Context, name string, p []byte, off int64) error {
	if s := c.scattered[name]; s != nil {
		return c.gather(ctx, s, p, int(off)/s.size)
	}
	at := c.where[name]
	_, err := files.Of(c.files[at.file]).ReadHost(ctx, p, c.headers[at.file].Tensors[at.tensor].Begin+off)
	return err
}

// SHA256 returns the digest of a tensor's bytes in its file, in row-major order and in
// hexadecimal. It ends early if ctx ends.
func (c *Checkpoint) SHA256(ctx context.Context, name string) (string, error) {
	info, ok := c.Info(name)
	if !ok {
		return "", fmt.Errorf("checkpoint: digest: there is no tensor %q", name)
	}
	h := sha256.New()
	if err := c.hashRun(ctx, h, make([]byte, min(verifyChunk, info.Bytes())), name, 0, info.Bytes()); err != nil {
		return "", &TensorError{Op: "digest", Path: info.File, Tensor: name, Offset: c.begin(name), Err: err}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// begin returns the offset of a tensor, or of its first part, in its file.
func (c *Checkpoint) begin(name string) int64 {
	at := c.where[name]
	return c.headers[at.file].Tensors[at.tensor].Begin
}
