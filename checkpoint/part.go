package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/dims"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A Part is a rank's share of a named tensor of a training state. A rank has at most one part
// of a tensor.
type Part struct {
	// Name is the name of the whole tensor, the same on all ranks.
	Name string
	// Data is the rank's part: a contiguous tensor on the device of the rank.
	Data tensor.Tensor
	// Shape is the shape of the whole tensor. nil says that Data is the whole tensor; if
	// several ranks have it, one of them writes it.
	Shape []int
	// Start is the first index of dimension Dim that Data has. Data has all indices of the
	// other dimensions.
	Start, Dim int
	// Flat says that Data is a run of the elements of the whole tensor in row-major order, as
	// a rank of a ddp.Sharder has it. Start is the number of its first element, and Dim is 0.
	Flat bool
}

// A box is the elements of a part: from each of Rows rows of Width elements, the Len elements
// from Start on.
type box struct{ Rows, Width, Start, Len int }

func (b box) elements() int { return b.Rows * b.Len }

// A partInfo is the description of a part that ranks exchange.
type partInfo struct {
	Name   string
	Format safetensors.DType
	Shape  []int // of the whole tensor
	Stored []int // of the part in a file
	Box    box
}

// bytes returns the size of the part.
func (p *partInfo) bytes() int64 { return int64(p.Box.elements()) * int64(p.Format.Bits()/8) }

// whole reports whether the part is the whole tensor.
func (p *partInfo) whole() bool { return p.Box.Len == p.Box.Width }

// describe checks a part of a rank on the device of s.
func (p *Part) describe(op string, s *stream.Stream) (info partInfo, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint: %s: part of tensor %q: %w", op, p.Name, err)
		}
	}()
	if p.Name == "" {
		return info, errors.New("it has no name")
	}
	if err := strided.Check("checkpoint", p.Data, s.Device()); err != nil {
		return info, err
	}
	if p.Data.IsHost() || !p.Data.Contiguous() {
		return info, fmt.Errorf("%s: want contiguous memory of a device", p.Data)
	}
	format, ok := formatOf(p.Data.DType())
	if !ok {
		return info, fmt.Errorf("the format has no type %s: %w", p.Data.DType(), errors.ErrUnsupported)
	}
	info = partInfo{Name: p.Name, Format: format, Shape: p.Shape, Stored: p.Data.Shape()}
	if p.Shape == nil {
		info.Shape = p.Data.Shape()
	}
	if !fits(info.Shape, p.Data.DType().Size()) || slices.ContainsFunc(info.Shape, func(n int) bool { return n < 0 }) {
		return info, fmt.Errorf("shape %v is larger than any memory, or negative", info.Shape)
	}
	if info.Box, err = p.box(info.Shape); err == nil && product(info.Shape) == 0 {
		info.Box = box{Rows: 1} // however it is cut
	}
	return info, err
}

// box returns the elements of the part of a tensor of the given shape.
func (p *Part) box(shape []int) (box, error) {
	n := product(shape)
	switch {
	case p.Shape == nil && (p.Start != 0 || p.Dim != 0 || p.Flat):
		return box{}, errors.New("the Shape of the whole tensor is not set, but Start, Dim or Flat is")
	case p.Shape == nil:
		return box{1, n, 0, n}, nil
	case p.Flat:
		if p.Start < 0 || p.Data.Len() > n-p.Start || p.Dim != 0 {
			return box{}, fmt.Errorf("elements %d to %d of %d, along dimension %d: they do not exist", p.Start, p.Start+p.Data.Len(), n, p.Dim)
		}
		return box{1, n, p.Start, p.Data.Len()}, nil
	}
	return p.boxOfDim(shape)
}

func (p *Part) boxOfDim(shape []int) (box, error) {
	dim, err := dims.Wrap(p.Dim, len(shape))
	if err == nil && len(shape) == 0 {
		err = errors.New("a tensor of one element has no dimension")
	}
	if err != nil {
		return box{}, err
	}
	have := p.Data.Shape()
	for i := range shape {
		if len(have) != len(shape) || i != dim && have[i] != shape[i] {
			return box{}, fmt.Errorf("shape %v as indices of dimension %d of shape %v: the other dimensions differ", have, dim, shape)
		}
	}
	if p.Start < 0 || have[dim] > shape[dim]-p.Start {
		return box{}, fmt.Errorf("indices %d to %d of dimension %d of shape %v do not exist", p.Start, p.Start+have[dim], dim, shape)
	}
	if have[dim] == shape[dim] {
		n := product(shape)
		return box{1, n, 0, n}, nil
	}
	inner := product(shape[dim+1:])
	return box{product(shape[:dim]), shape[dim] * inner, p.Start * inner, have[dim] * inner}, nil
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// describeParts checks the parts of a rank, and returns their descriptions by name.
func describeParts(op string, s *stream.Stream, parts []Part) ([]partInfo, error) {
	all := make([]partInfo, 0, len(parts))
	for i := range parts {
		info, err := parts[i].describe(op, s)
		if err != nil {
			return nil, err
		}
		all = append(all, info)
	}
	slices.SortFunc(all, func(a, b partInfo) int { return cmp.Compare(a.Name, b.Name) })
	for i := 1; i < len(all); i++ {
		if all[i].Name == all[i-1].Name {
			return nil, fmt.Errorf("checkpoint: %s: the rank has two parts of tensor %q: want one", op, all[i].Name)
		}
	}
	return all, nil
}

// bytesOf returns all bytes of a part in device memory.
func bytesOf(x tensor.Tensor) (memory.Slice[byte], error) {
	return memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
}
