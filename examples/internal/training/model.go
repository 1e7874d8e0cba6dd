// Package training is shared by the training examples: a small classifier of handwritten
// digits, its data, and the training loop. The examples implement the reduction of
// gradients and the update of parameters. A Resume continues any example after its newest checkpoint.
package training

import (
	_ "embed"
	"errors"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The parameters.
const (
	w1 = iota // [hidden pixels]
	b1        // [hidden]
	w2        // [classes hidden]
	b2        // [classes]
)

// ParamLens holds the lengths of the parameters, as the forward pass uses them.
var ParamLens = []int{hidden * pixels, hidden, classes * hidden, classes}

type floatSlice = memory.Slice[float32]

// A Model is Linear(64,128)-ReLU-Linear(128,10) on one device. Methods enqueue on
// Stream.
type Model struct {
	Stream *stream.Stream
	// Params and Grads have the lengths ParamLens. The program owns them.
	Params, Grads []memory.Slice[float32]

	k       *kernels
	scratch [4]floatSlice // x, h, z, dh
	y       memory.Slice[int32]

	rows int // rows of the loaded batch
}

// NewModel creates a model without parameters and gradients.
func NewModel(dev *device.Device) (m *Model, err error) {
	m = &Model{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if m.Stream, err = stream.New(dev, nil); err != nil {
		return m, err
	}
	if m.k, err = compileKernels(dev); err != nil {
		return m, err
	}
	for i, cols := range []int{pixels, hidden, classes, hidden} {
		if m.scratch[i], err = memory.Make[float32](m.Stream, maxRows*cols); err != nil {
			return m, err
		}
	}
	m.y, err = memory.Make[int32](m.Stream, maxRows)
	return m, err
}

// Init writes the initial weights to Params. Biases must already be zero.
func (m *Model) Init() error {
	if err := m.Params[w1].CopyFrom(m.Stream, floats(w1Bytes)); err != nil {
		return err
	}
	return m.Params[w2].CopyFrom(m.Stream, floats(w2Bytes))
}

// Close frees the memory of the model, except Params and Grads.
func (m *Model) Close() error {
	errs := []error{m.y.Close()}
	for _, x := range m.scratch {
		errs = append(errs, x.Close())
	}
	if m.k != nil {
		errs = append(errs, m.k.module.Close())
	}
	return errors.Join(append(errs, m.Stream.Close())...)
}

// Pass enqueues the forward and the backward pass for this rank's part of a batch. loss
// receives the part of the batch's mean loss. need may be nil; see Trainer for the hooks.
func (m *Model) Pass(part Digits, loss memory.Slice[float32], need, ready Hook) error {
	if err := m.load(part); err != nil {
		return err
	}
	if err := m.forward(need); err != nil {
		return err
	}
	return m.backward(loss, ready)
}

// load copies a batch to the device.
func (m *Model) load(d Digits) error {
	m.rows = d.Rows()
	if err := m.scratch[0].Slice(0, m.rows*pixels).CopyFrom(m.Stream, d.x); err != nil {
		return err
	}
	return m.y.Slice(0, m.rows).CopyFrom(m.Stream, d.y)
}

// forward computes the logits, without bias, of the loaded batch.
func (m *Model) forward(need Hook) error {
	x, h, z := m.act(0, pixels), m.act(1, hidden), m.act(2, classes)
	if err := m.each(need, w1, b1); err != nil {
		return err
	}
	if err := tensor.MatMul(m.Stream, h, x, m.weight(m.Params, w1, hidden, pixels).T(), nil); err != nil {
		return err
	}
	err := m.k.biasReLU.Launch(m.Stream, kernel.Cover(m.rows*hidden), kernel.Ptr(m.scratch[1]), kernel.Ptr(m.Params[b1]),
		kernel.Scalar(int32(m.rows)), kernel.Scalar[int32](hidden))
	if err != nil {
		return err
	}
	if err := m.each(need, w2, b2); err != nil {
		return err
	}
	return tensor.MatMul(m.Stream, z, h, m.weight(m.Params, w2, classes, hidden).T(), nil)
}

func (m *Model) each(need Hook, params ...int) error {
	if need == nil {
		return nil
	}
	for _, i := range params {
		if err := need(m.Stream, i); err != nil {
			return err
		}
	}
	return nil
}

// backward computes the gradients of this rank's part of the batch, divided by
// the rows of the whole batch. Their sum over the ranks is the gradient of the
// mean. It calls ready for each gradient once its computation is enqueued.
func (m *Model) backward(loss floatSlice, ready Hook) error {
	x, h, dz, dh := m.act(0, pixels), m.act(1, hidden), m.act(2, classes), m.act(3, hidden)
	err := m.k.softmaxLoss.Launch(m.Stream, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{256, 1, 1}},
		kernel.Ptr(m.scratch[2]), kernel.Ptr(m.Params[b2]), kernel.Ptr(m.y), kernel.Ptr(loss),
		kernel.Scalar[float32](1./BatchRows), kernel.Scalar(int32(m.rows)), kernel.Scalar[int32](classes))
	if err != nil {
		return err
	}
	if err := m.columnSum(b2, m.scratch[2], classes, ready); err != nil {
		return err
	}
	if err := m.product(w2, dz, h, classes, hidden, ready); err != nil {
		return err
	}
	if err := tensor.MatMul(m.Stream, dh, dz, m.weight(m.Params, w2, classes, hidden), nil); err != nil {
		return err
	}
	err = m.k.reluBack.Launch(m.Stream, kernel.Cover(m.rows*hidden), kernel.Ptr(m.scratch[3]), kernel.Ptr(m.scratch[1]),
		kernel.Scalar(int32(m.rows*hidden)))
	if err != nil {
		return err
	}
	if err := m.columnSum(b1, m.scratch[3], hidden, ready); err != nil {
		return err
	}
	return m.product(w1, dh, x, hidden, pixels, ready)
}

// columnSum computes the gradient of a bias.
func (m *Model) columnSum(bias int, d floatSlice, cols int, ready Hook) error {
	err := m.k.columnSum.Launch(m.Stream, kernel.Cover(cols), kernel.Ptr(m.Grads[bias]), kernel.Ptr(d),
		kernel.Scalar(int32(m.rows)), kernel.Scalar(int32(cols)))
	if err != nil {
		return err
	}
	return ready(m.Stream, bias)
}

// product computes the gradient of a weight: dᵀ·in.
func (m *Model) product(weight int, d, in tensor.Tensor, out, cols int, ready Hook) error {
	if err := tensor.MatMul(m.Stream, m.weight(m.Grads, weight, out, cols), d.T(), in, nil); err != nil {
		return err
	}
	return ready(m.Stream, weight)
}

// SGD updates parameters p with gradients g and momenta v, with the learning rate
// and momentum of the PyTorch run.
func (m *Model) SGD(p, v, g memory.Slice[float32]) error {
	return m.k.sgd.Launch(m.Stream, kernel.Cover(p.Len()), kernel.Ptr(p), kernel.Ptr(v), kernel.Ptr(g),
		kernel.Scalar[float32](0.1), kernel.Scalar[float32](0.9), kernel.Scalar(int32(p.Len())))
}

// Accuracy returns the fraction of correct predictions. need may be nil.
func (m *Model) Accuracy(d Digits, need Hook) (float64, error) {
	if err := m.load(d); err != nil {
		return 0, err
	}
	if err := m.forward(need); err != nil {
		return 0, err
	}
	z, b := make([]float32, m.rows*classes), make([]float32, classes)
	if err := m.scratch[2].Slice(0, len(z)).CopyTo(m.Stream, z); err != nil {
		return 0, err
	}
	if err := m.Params[b2].CopyTo(m.Stream, b); err != nil {
		return 0, err
	}
	right := 0
	for r, want := range d.y {
		best := 0
		for c := range classes {
			if z[r*classes+c]+b[c] > z[r*classes+best]+b[best] {
				best = c
			}
		}
		if best == int(want) {
			right++
		}
	}
	return float64(right) / float64(m.rows), nil
}

// act returns the used rows of activation i as a matrix.
func (m *Model) act(i, cols int) tensor.Tensor {
	return matrix(m.scratch[i].Slice(0, m.rows*cols), m.rows, cols)
}

func (m *Model) weight(from []floatSlice, i, rows, cols int) tensor.Tensor {
	return matrix(from[i], rows, cols)
}

// matrix returns memory as a matrix; the shape must fit.
func matrix(x floatSlice, rows, cols int) tensor.Tensor {
	t, err := tensor.Of(x, rows, cols)
	if err != nil {
		panic(err)
	}
	return t
}

//go:embed kernels.cu
var kernelsCU string

// kernels holds the compiled kernels of kernels.cu. Virtual devices use the Go
// functions below.
type kernels struct {
	module                                          *kernel.Module
	biasReLU, softmaxLoss, reluBack, columnSum, sgd *kernel.Kernel
}

func compileKernels(dev *device.Device) (*kernels, error) {
	const ptr, num, flt = kernel.Pointer, kernel.I32, kernel.F32
	m, err := kernel.Compile(dev, &kernel.Source{
		Name: "kernels.cu",
		CUDA: kernelsCU,
		Kernels: []kernel.Def{
			{Name: "bias_relu", Params: []kernel.Param{ptr, ptr, num, num}, Go: biasReLU},
			{Name: "softmax_loss", Params: []kernel.Param{ptr, ptr, ptr, ptr, flt, num, num}, Go: softmaxLoss},
			{Name: "relu_back", Params: []kernel.Param{ptr, ptr, num}, Go: reluBack},
			{Name: "column_sum", Params: []kernel.Param{ptr, ptr, num, num}, Go: columnSum},
			{Name: "sgd", Params: []kernel.Param{ptr, ptr, ptr, flt, flt, num}, Go: sgd},
		},
	})
	if err != nil {
		return nil, err
	}
	k := &kernels{module: m}
	for name, to := range map[string]**kernel.Kernel{
		"bias_relu": &k.biasReLU, "softmax_loss": &k.softmaxLoss, "relu_back": &k.reluBack,
		"column_sum": &k.columnSum, "sgd": &k.sgd,
	} {
		if *to, err = m.Kernel(name); err != nil {
			return nil, err
		}
	}
	return k, nil
}

func biasReLU(c *kernel.Call) {
	rows, cols := int(kernel.Get[int32](c, 2)), int(kernel.Get[int32](c, 3))
	h, b := kernel.Update[float32](c, 0, rows*cols), kernel.Read[float32](c, 1, cols)
	for i := range h {
		h[i] = max(h[i]+b[i%cols], 0)
	}
}

func softmaxLoss(c *kernel.Call) {
	scale, rows, cols := float64(kernel.Get[float32](c, 4)), int(kernel.Get[int32](c, 5)), int(kernel.Get[int32](c, 6))
	z, b := kernel.Update[float32](c, 0, rows*cols), kernel.Read[float32](c, 1, cols)
	y, loss := kernel.Read[int32](c, 2, rows), kernel.Update[float32](c, 3, 1)
	sum := 0.0
	for r := range rows {
		row := z[r*cols : (r+1)*cols]
		top, total := math.Inf(-1), 0.0
		for i := range row {
			row[i] += b[i]
			top = max(top, float64(row[i]))
		}
		for _, v := range row {
			total += math.Exp(float64(v) - top)
		}
		sum += math.Log(total) + top - float64(row[y[r]])
		for i, v := range row {
			g := math.Exp(float64(v)-top) / total
			if i == int(y[r]) {
				g--
			}
			row[i] = float32(scale * g)
		}
	}
	loss[0] = float32(scale * sum)
}

func reluBack(c *kernel.Call) {
	n := int(kernel.Get[int32](c, 2))
	dh, h := kernel.Update[float32](c, 0, n), kernel.Read[float32](c, 1, n)
	for i := range dh {
		if h[i] <= 0 {
			dh[i] = 0
		}
	}
}

func columnSum(c *kernel.Call) {
	rows, cols := int(kernel.Get[int32](c, 2)), int(kernel.Get[int32](c, 3))
	out, x := kernel.Update[float32](c, 0, cols), kernel.Read[float32](c, 1, rows*cols)
	for i := range out {
		s := float32(0)
		for r := range rows {
			s += x[r*cols+i]
		}
		out[i] = s
	}
}

func sgd(c *kernel.Call) {
	n := int(kernel.Get[int32](c, 5))
	p, v := kernel.Update[float32](c, 0, n), kernel.Update[float32](c, 1, n)
	g := kernel.Read[float32](c, 2, n)
	lr, momentum := kernel.Get[float32](c, 3), kernel.Get[float32](c, 4)
	for i := range p {
		v[i] = momentum*v[i] + g[i]
		p[i] -= lr * v[i]
	}
}
