package digits

import (
	_ "embed"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
)

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
