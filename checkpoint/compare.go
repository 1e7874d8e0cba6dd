package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"math"
	"runtime"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Difference is a tensor that differs between two checkpoints.
type Difference struct {
	Name string
	A, B *Info // nil if the checkpoint lacks the tensor

	// The elements, if both tensors have the same type and shape.
	Elements int64   // number of elements whose bytes differ
	First    []int   // indices of the first one in row-major order
	MaxAbs   float64 // largest absolute difference; NaN if one is NaN, or the type has no values here
}

func (d *Difference) String() string {
	switch {
	case d.A == nil:
		return fmt.Sprintf("tensor %q: only in the second checkpoint", d.Name)
	case d.B == nil:
		return fmt.Sprintf("tensor %q: only in the first checkpoint", d.Name)
	case d.A.Format != d.B.Format || !slices.Equal(d.A.Shape, d.B.Shape):
		return fmt.Sprintf("tensor %q: %s %v in the first checkpoint, %s %v in the second", d.Name, d.A.Format, d.A.Shape, d.B.Format, d.B.Shape)
	}
	return fmt.Sprintf("tensor %q: %d elements differ, the first at %v, by at most %g", d.Name, d.Elements, d.First, d.MaxAbs)
}

// Compare compares two checkpoints of any formats on the host, without a
// device: names, types, shapes and the bytes of elements. It returns the
// differences by name. It reads at most 16 tensors at the same time, with 8 MiB
// of memory for each.
func Compare(ctx context.Context, a, b *Checkpoint) ([]Difference, error) {
	if err := cmp.Or(a.check("compare"), b.check("compare")); err != nil {
		return nil, err
	}
	var list []Difference
	var both []string
	for _, x := range a.infos {
		y, ok := b.Info(x.Name)
		switch {
		case !ok:
			list = append(list, Difference{Name: x.Name, A: &x})
		case x.Format != y.Format || !slices.Equal(x.Shape, y.Shape):
			list = append(list, Difference{Name: x.Name, A: &x, B: &y})
		default:
			both = append(both, x.Name)
		}
	}
	for _, y := range b.infos {
		if _, ok := a.Info(y.Name); !ok {
			list = append(list, Difference{Name: y.Name, B: &y})
		}
	}
	var mu sync.Mutex
	err := each(ctx, both, func(ctx context.Context, name string) error {
		d, err := compareOne(ctx, a, b, name)
		mu.Lock()
		defer mu.Unlock()
		if d.Elements > 0 {
			list = append(list, *d)
		}
		return err
	})
	slices.SortFunc(list, func(x, y Difference) int { return cmp.Compare(x.Name, y.Name) })
	return list, ended(ctx, "compare", err)
}

// compareOne compares the elements of a tensor.
func compareOne(ctx context.Context, a, b *Checkpoint, name string) (*Difference, error) {
	x, _ := a.Info(name)
	y, _ := b.Info(name)
	d := &differ{Difference: Difference{Name: name, A: &x, B: &y}, shape: x.Shape}
	d.dtype, d.size = values(x.Format)
	const chunk = verifyChunk / 2
	p, q := make([]byte, min(chunk, x.Bytes())), make([]byte, min(chunk, x.Bytes()))
	for at := int64(0); at < x.Bytes(); at += chunk {
		n := min(chunk, x.Bytes()-at)
		if err := a.read(ctx, name, p[:n], at); err != nil {
			return &d.Difference, &TensorError{Op: "compare", Path: x.File, Tensor: name, Offset: a.begin(name), Err: err}
		}
		if err := b.read(ctx, name, q[:n], at); err != nil {
			return &d.Difference, &TensorError{Op: "compare", Path: y.File, Tensor: name, Offset: b.begin(name), Err: err}
		}
		if !bytes.Equal(p[:n], q[:n]) {
			d.add(p[:n], q[:n], at)
		}
	}
	return &d.Difference, nil
}

// A differ is a comparison of elements.
type differ struct {
	Difference
	shape []int
	dtype memory.DType // of the values in an element; Invalid if it is unknown
	size  int          // bytes of an element; 0 if an element is smaller than a byte
}

// values returns the type of the values in an element, and the size of the element.
func values(t safetensors.DType) (memory.DType, int) {
	if t == safetensors.C64 {
		return memory.Float32, 8
	}
	return dtypes[t], t.Bits() / 8
}

// add compares bytes at an offset of the tensor.
func (d *differ) add(p, q []byte, off int64) {
	size := max(d.size, 1)
	for i := 0; i < len(p); i += size {
		if bytes.Equal(p[i:i+size], q[i:i+size]) {
			continue
		}
		if d.Elements == 0 {
			d.First = d.index(off + int64(i))
		}
		d.Elements++
		if d.dtype == memory.Invalid {
			d.MaxAbs = math.NaN()
			continue
		}
		for k := i; k < i+size; k += d.dtype.Size() {
			d.MaxAbs = math.Max(d.MaxAbs, distance(d.dtype, p[k:], q[k:])) // NaN if one is
		}
	}
}

// index returns the indices of the element at an offset of the tensor.
func (d *differ) index(off int64) []int {
	n := int(off) / max(d.size, 1)
	if d.size == 0 {
		return []int{n} // of the byte
	}
	at := make([]int, len(d.shape))
	for i := len(at) - 1; i >= 0; i-- {
		at[i] = n % d.shape[i]
		n /= d.shape[i]
	}
	return at
}

// distance returns the absolute difference of two values.
func distance(t memory.DType, p, q []byte) float64 {
	x, y := dtype.Of(t).Load(p, 0), dtype.Of(t).Load(q, 0)
	if dtype.Of(t).IsFloat() {
		a, b := x.Float64(), y.Float64()
		if a == b { // also infinities
			return 0
		}
		return math.Abs(a - b)
	}
	a, b := x.Int64(), y.Int64()
	if t == memory.Uint64 && uint64(a) < uint64(b) || t != memory.Uint64 && a < b {
		a, b = b, a
	}
	return float64(uint64(a) - uint64(b)) // exact also where a float64 of each is not
}

// Verify compares the SHA-256 of the rank's tensors on the device with the same parts of the
// files, which it reads by the page cache. The error names the tensor, its file and both
// digests. Verify cannot compare converted tensors: the error matches errors.ErrUnsupported.
// Several goroutines share the work.
func (c *Checkpoint) Verify(ctx context.Context, w *Weights) error {
	if w == nil {
		return errors.New("checkpoint: verify: no weights given")
	}
	if err := c.check("verify"); err != nil {
		return err
	}
	if err := strided.Check("checkpoint: verify", w.slab, nil); err != nil {
		return err
	}
	s, err := stream.New(w.slab.Device(), nil)
	if err != nil {
		return fmt.Errorf("checkpoint: verify: %w", err)
	}
	// The weights may have outlived the stream that they were loaded on.
	if on := inside.BufferOf(w.slab.Buffer()).Stream; gpu.CheckStream("checkpoint: verify", on, nil) == nil {
		err = s.WaitStream(on)
	}
	if err == nil {
		err = ended(ctx, "verify", each(ctx, w.Names(), func(ctx context.Context, name string) error { return c.verify(ctx, w, s, name) }))
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

// SHA256 returns the digest of a tensor's bytes in its file, in row-major order
// and in hexadecimal, unless ctx ends first.
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

// A TensorError is an error about one tensor of a checkpoint.
type TensorError struct {
	Op     string // such as "load"
	Path   string // of the file
	Tensor string
	Offset int64 // in the file; -1 if the error is about no byte
	Err    error
}

func (e *TensorError) Error() string {
	text := e.Err.Error()
	why := ": " + strings.TrimPrefix(text, "checkpoint: ")
	if of, ok := errors.AsType[*gds.Error](e.Err); ok && of.Error() == text {
		why = strings.TrimPrefix(text, placeOf(of)) // which e names itself
	}
	if e.Offset < 0 {
		return fmt.Sprintf("checkpoint: %s %s: tensor %q%s", e.Op, e.Path, e.Tensor, why)
	}
	return fmt.Sprintf("checkpoint: %s %s: tensor %q at byte %d%s", e.Op, e.Path, e.Tensor, e.Offset, why)
}

// placeOf returns the beginning of the text of an error about a file.
func placeOf(e *gds.Error) string {
	if e.Offset < 0 {
		return fmt.Sprintf("gds: %s %s", e.Op, e.Path)
	}
	return fmt.Sprintf("gds: %s %s at byte %d", e.Op, e.Path, e.Offset)
}

// Unwrap returns the cause.
func (e *TensorError) Unwrap() error { return e.Err }

// ended adds the operation to an error that is only the cause of the end of ctx.
func ended(ctx context.Context, op string, err error) error {
	if ctx.Err() == nil || err != context.Cause(ctx) {
		return err
	}
	return fmt.Errorf("checkpoint: %s: %w", op, err)
}

// A RankError names the rank that could not move its part. All ranks get one, also in other
// processes. The error of the rank itself wraps the cause.
type RankError struct {
	Op     string // "load" or "save"
	Rank   int
	Reason string
	Err    error // nil if the rank is in another process
}

func (e *RankError) Error() string {
	return fmt.Sprintf("checkpoint: %s: rank %d: %s", e.Op, e.Rank, e.Reason)
}

func (e *RankError) Unwrap() error { return e.Err }

// named adds the name of the tensor to errors about a byte of a file.
func (m *executor) named(errs []error) []error {
	for i, err := range errs {
		e, ok := errors.AsType[*gds.Error](err)
		if !ok || e.Offset < 0 {
			continue
		}
		for f, file := range m.files {
			if file.Path() == e.Path {
				errs[i] = &TensorError{Op: m.op, Path: e.Path, Tensor: tensorAt(m.headers[f], e.Offset), Offset: e.Offset, Err: err}
			}
		}
	}
	return errs
}

// tensorAt returns the name of the tensor that has a byte of a file, or of the next tensor.
func tensorAt(h *safetensors.Header, off int64) string {
	all := h.Tensors
	i := sort.Search(len(all), func(i int) bool { return all[i].End > off })
	if i == len(all) {
		return "(after the last)"
	}
	return all[i].Name
}
