package main

import (
	"errors"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The parameters, in the order of the flat memory that holds them.
const (
	w1 = iota // [hidden pixels]
	b1        // [hidden]
	w2        // [digits hidden]
	b2        // [digits]
)

var paramLens = []int{hidden * pixels, hidden, digits * hidden, digits}

type floatSlice = memory.Slice[float32]

// A model is Linear(64,128)-ReLU-Linear(128,10) on one device, with room for the
// activations of up to maxRows rows.
type model struct {
	s       *stream.Stream
	k       *kernels
	flat    [3]floatSlice // parameters, gradients, momenta
	params  []floatSlice  // parts of flat[0]
	grads   []floatSlice  // parts of flat[1]
	scratch [4]floatSlice // x, h, z, dh
	y       memory.Slice[int32]
	rows    int // of the batch that is loaded
}

func newModel(dev *device.Device, maxRows int) (m *model, err error) {
	m = &model{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if m.s, err = stream.New(dev, nil); err != nil {
		return m, err
	}
	if m.k, err = compileKernels(dev); err != nil {
		return m, err
	}
	parts := [3][]floatSlice{}
	for i := range m.flat {
		if m.flat[i], parts[i], err = memory.MakeFlat[float32](m.s, paramLens...); err != nil {
			return m, err
		}
		if err = m.flat[i].Zero(m.s); err != nil {
			return m, err
		}
	}
	m.params, m.grads = parts[0], parts[1]
	for i, cols := range []int{pixels, hidden, digits, hidden} {
		if m.scratch[i], err = memory.Make[float32](m.s, maxRows*cols); err != nil {
			return m, err
		}
	}
	if m.y, err = memory.Make[int32](m.s, maxRows); err != nil {
		return m, err
	}
	if err = m.params[w1].CopyFrom(m.s, floats(w1Bytes)); err != nil {
		return m, err
	}
	return m, m.params[w2].CopyFrom(m.s, floats(w2Bytes))
}

func (m *model) close() error {
	errs := []error{m.y.Close()}
	for _, x := range append(m.scratch[:], m.flat[:]...) {
		errs = append(errs, x.Close())
	}
	if m.k != nil {
		errs = append(errs, m.k.module.Close())
	}
	return errors.Join(append(errs, m.s.Close())...)
}

// load copies a batch to the device.
func (m *model) load(d dataset) error {
	m.rows = d.rows()
	if err := m.scratch[0].Slice(0, m.rows*pixels).CopyFrom(m.s, d.x); err != nil {
		return err
	}
	return m.y.Slice(0, m.rows).CopyFrom(m.s, d.y)
}

// forward computes the logits, less their bias, of the batch that is loaded.
func (m *model) forward() error {
	x, h, z := m.act(0, pixels), m.act(1, hidden), m.act(2, digits)
	if err := tensor.MatMul(m.s, h, x, m.weight(m.params, w1, hidden, pixels).T(), nil); err != nil {
		return err
	}
	err := m.k.biasReLU.Launch(m.s, kernel.Cover(m.rows*hidden), kernel.Ptr(m.scratch[1]), kernel.Ptr(m.params[b1]),
		kernel.Int32(int32(m.rows)), kernel.Int32(hidden))
	if err != nil {
		return err
	}
	return tensor.MatMul(m.s, z, h, m.weight(m.params, w2, digits, hidden).T(), nil)
}

// backward computes the gradients of this rank's part of the batch, divided by
// the rows of the whole batch, so that their sum over the ranks is the gradient
// of the mean; each is handed to the reducer as soon as it is enqueued.
func (m *model) backward(loss floatSlice, red *comm.Reducer[float32]) error {
	x, h, dz, dh := m.act(0, pixels), m.act(1, hidden), m.act(2, digits), m.act(3, hidden)
	err := m.k.softmaxLoss.Launch(m.s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{256, 1, 1}},
		kernel.Ptr(m.scratch[2]), kernel.Ptr(m.params[b2]), kernel.Ptr(m.y), kernel.Ptr(loss),
		kernel.Float32(1./batchRows), kernel.Int32(int32(m.rows)), kernel.Int32(digits))
	if err != nil {
		return err
	}
	if err := m.columnSum(b2, m.scratch[2], digits, red); err != nil {
		return err
	}
	if err := m.product(w2, dz, h, digits, hidden, red); err != nil {
		return err
	}
	if err := tensor.MatMul(m.s, dh, dz, m.weight(m.params, w2, digits, hidden), nil); err != nil {
		return err
	}
	err = m.k.reluBack.Launch(m.s, kernel.Cover(m.rows*hidden), kernel.Ptr(m.scratch[3]), kernel.Ptr(m.scratch[1]),
		kernel.Int32(int32(m.rows*hidden)))
	if err != nil {
		return err
	}
	if err := m.columnSum(b1, m.scratch[3], hidden, red); err != nil {
		return err
	}
	return m.product(w1, dh, x, hidden, pixels, red)
}

// columnSum makes the gradient of a bias.
func (m *model) columnSum(bias int, d floatSlice, cols int, red *comm.Reducer[float32]) error {
	err := m.k.columnSum.Launch(m.s, kernel.Cover(cols), kernel.Ptr(m.grads[bias]), kernel.Ptr(d),
		kernel.Int32(int32(m.rows)), kernel.Int32(int32(cols)))
	if err != nil {
		return err
	}
	return red.Ready(m.s, bias)
}

// product makes the gradient of a weight: dᵀ·in.
func (m *model) product(weight int, d, in tensor.Tensor, out, cols int, red *comm.Reducer[float32]) error {
	if err := tensor.MatMul(m.s, m.weight(m.grads, weight, out, cols), d.T(), in, nil); err != nil {
		return err
	}
	return red.Ready(m.s, weight)
}

// step updates the parameters.
func (m *model) step(lr, momentum float32) error {
	n := m.flat[0].Len()
	return m.k.sgd.Launch(m.s, kernel.Cover(n), kernel.Ptr(m.flat[0]), kernel.Ptr(m.flat[2]), kernel.Ptr(m.flat[1]),
		kernel.Float32(lr), kernel.Float32(momentum), kernel.Int32(int32(n)))
}

// accuracy returns how much of the data the model gets right.
func (m *model) accuracy(d dataset) (float64, error) {
	if err := m.load(d); err != nil {
		return 0, err
	}
	if err := m.forward(); err != nil {
		return 0, err
	}
	z, b := make([]float32, m.rows*digits), make([]float32, digits)
	if err := m.scratch[2].Slice(0, len(z)).CopyTo(m.s, z); err != nil {
		return 0, err
	}
	if err := m.params[b2].CopyTo(m.s, b); err != nil {
		return 0, err
	}
	right := 0
	for r, want := range d.y {
		best := 0
		for c := range digits {
			if z[r*digits+c]+b[c] > z[r*digits+best]+b[best] {
				best = c
			}
		}
		if best == int(want) {
			right++
		}
	}
	return float64(right) / float64(m.rows), nil
}

// act is the first rows of activation i as a matrix.
func (m *model) act(i, cols int) tensor.Tensor {
	return matrix(m.scratch[i].Slice(0, m.rows*cols), m.rows, cols)
}

func (m *model) weight(from []floatSlice, i, rows, cols int) tensor.Tensor {
	return matrix(from[i], rows, cols)
}

// matrix gives memory a shape that is known to fit.
func matrix(x floatSlice, rows, cols int) tensor.Tensor {
	t, err := tensor.Of(x, rows, cols)
	if err != nil {
		panic(err)
	}
	return t
}
