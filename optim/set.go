package optim

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// SetGradients gives the parameters of all groups, in order, the gradients that
// later steps use, in place of those of Param or of the last call. They are
// contiguous, and each has the length and the type of the gradient before, or
// of the value if Param had none. Programs call it if gradients have other
// memory in each step, as with ddp.Units (torch: p.grad = g). The addresses are
// stored on s, without a wait of the host, and a graph can capture the call.
// Grads of the optimiser follow. An error changes nothing.
func (o *Optimizer) SetGradients(s *stream.Stream, gradients ...tensor.Tensor) error {
	const op = "set gradients"
	k, err := o.enter(op, s)
	if err != nil {
		return err
	}
	if len(gradients) != len(o.params) {
		return refuse(op, "%d gradients for %d parameters: want one for each", len(gradients), len(o.params))
	}
	for i := range gradients {
		x, p := gradients[i], &o.params[i]
		if err := checkTensor(x, o.dev); err != nil {
			return refuse(op, "gradient %d: %w", i, err)
		}
		if want := p.gradType(); x.DType() != want || x.Len() != p.Value.Len() {
			return refuse(op, "gradient %d has %d elements of %s: want %d of %s", i, x.Len(), x.DType(), p.Value.Len(), want)
		}
		if x.Len() == 0 {
			continue
		}
		if err := o.written.apartFrom(op, spanOf(&x, "a new gradient")); err != nil {
			return err
		}
	}
	o.followers = slices.DeleteFunc(o.followers, func(g *Grads) bool { return g.owner.Closed() })
	if len(o.followers) > 0 {
		if err := apart(op, gradients); err != nil {
			return err
		}
	}
	if err := k.address(s, o.table.memory, wordsOf[entry](), gradWord, gradients); err != nil {
		return refuse(op, "%w", err)
	}
	for i := range gradients {
		o.params[i].Grad = gradients[i]
	}
	for _, g := range o.followers {
		err = errors.Join(err, g.graphs.Add(gpu.StreamOf(s)))
		copy(g.list, gradients)
		err = errors.Join(err, k.address(s, g.norms.memory, wordsOf[list](), 0, gradients), k.address(s, g.table.memory, wordsOf[list](), 0, gradients))
	}
	if err != nil {
		return refuse(op, "%w", err)
	}
	return nil
}

// Grads is NewGrads for the gradients of all groups, in order, and follows
// SetGradients. If a parameter has no gradient yet, the operations of the
// result return errors until SetGradients was called.
func (o *Optimizer) Grads(s *stream.Stream) (*Grads, error) {
	const op = "new gradients"
	if _, err := o.enter(op, s); err != nil {
		return nil, err
	}
	rows := make([]list, len(o.params))
	for i := range rows {
		p := &o.params[i]
		rows[i] = list{at: p.Grad.Ptr(), n: uint64(p.Value.Len()), dtype: uint32(p.gradType())}
	}
	g, err := newGrads(s, o.Gradients(), rows)
	if err == nil {
		o.followers = append(o.followers, g)
	}
	return g, err
}

// gradType returns the type of the gradient.
func (p *held) gradType() memory.DType {
	if p.Grad.DType() == memory.Invalid {
		return p.Value.DType()
	}
	return p.Grad.DType()
}

// apart returns an error if two gradients share memory.
func apart(op string, gradients []tensor.Tensor) error {
	var all spans
	for i := range gradients {
		all.add(&gradients[i], fmt.Sprintf("gradient %d", i))
	}
	return all.apart(op)
}

// The word of an entry that is the address of the gradient.
const gradWord = uint32(unsafe.Offsetof(entry{}.grad) / 8)

// wordsOf returns the words of a row.
func wordsOf[R entry | list]() uint32 {
	var r R
	return uint32(unsafe.Sizeof(r) / 8)
}

// Addresses of gradients go to a table by value, so that a graph keeps them. It must agree with
// optim.cu.
const mostAddresses = 256

// address stores the addresses of tensors in the rows of a table: in word at of the words of each.
func (k *kernels) address(s *stream.Stream, table memory.Slice[uint8], words, at uint32, of []tensor.Tensor) error {
	var values [mostAddresses]uint64
	for first := 0; first < len(of); first += mostAddresses {
		part := of[first:min(first+mostAddresses, len(of))]
		for i := range part {
			values[i] = part[i].Ptr()
		}
		err := k.store.Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{mostAddresses, 1, 1}}, kernel.Ptr(table),
			kernel.Bytes(unsafe.Slice((*byte)(unsafe.Pointer(&values)), unsafe.Sizeof(values))),
			kernel.Scalar(uint32(len(part))), kernel.Scalar(uint32(first)*words+at), kernel.Scalar(words))
		if err != nil {
			return err
		}
	}
	return nil
}

// standInStore is store_addresses for virtual devices.
func standInStore(c *kernel.Call) {
	values := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(c.Bytes(1)))), mostAddresses)
	n, first, words := kernel.Get[uint32](c, 2), kernel.Get[uint32](c, 3), kernel.Get[uint32](c, 4)
	for i := range n {
		kernel.UpdateAddress[uint64](c, c.Address(0)+8*uint64(first+i*words), 1)[0] = values[i]
	}
}
