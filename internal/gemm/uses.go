package gemm

import (
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// maxColumns is the number of columns that are listed one by one. Matrices with more columns
// and with gaps between them are not listed, because the gaps may belong to others.
const maxColumns = 1 << 14

// uses lists the matrices of the call in progress, for the sanitizer. It omits biases, scales
// and auxiliary buffers.
func (q *queue) uses() (uses []cudadrv.Use) {
	p := &q.now
	add := func(at cudadrv.DevicePtr, l Layout, rows, cols int64, write bool) {
		size := sizeOf(l.Type)
		batch := p.Batch
		if l.LD == rows {
			rows, cols = rows*cols, 1
		}
		if l.Stride == 0 {
			batch = 1
		}
		if at == 0 || batch*cols > maxColumns {
			return
		}
		for b := range batch {
			for c := range cols {
				first := cudadrv.DevicePtr((b*l.Stride + c*l.LD) * size)
				uses = append(uses, cudadrv.Use{Ptr: at + first, Bytes: uint64(rows * size), Write: write})
			}
		}
	}
	stored := func(rows, cols int64, op cublasapi.Op) (int64, int64) {
		if op == cublasapi.Trans {
			return cols, rows
		}
		return rows, cols
	}
	rows, cols := stored(p.M, p.K, p.TransA)
	add(p.At.A, p.A, rows, cols, false)
	rows, cols = stored(p.K, p.N, p.TransB)
	add(p.At.B, p.B, rows, cols, false)
	if p.Separate {
		add(p.At.C, p.C, p.M, p.N, false)
	}
	add(p.At.D, p.D, p.M, p.N, true)
	return uses
}
