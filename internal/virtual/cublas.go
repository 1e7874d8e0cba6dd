package virtual

import "github.com/gochorus/chorus/internal/cublasapi"

type cublasLib struct {
	cublasapi.API
	m *Machine
}

func newCUBLAS(m *Machine) *cublasLib { return &cublasLib{m: m} }
