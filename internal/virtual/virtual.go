// Package virtual puts the virtual GPUs together: a machine with its libraries.
package virtual

import (
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/blas"
	"github.com/gochorus/chorus/internal/virtual/cufile"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/nccl"
)

// A Machine is a machine with its libraries.
type Machine struct {
	*machine.Machine
	nccl   ncclapi.API
	cublas cublasapi.API
	lt     cublasltapi.API
	cufile cufileapi.API
}

// Config describes a machine and its NCCL.
type Config struct {
	machine.Config
	NCCL nccl.Config
}

// New creates a machine. It fails only if the configuration is invalid.
func New(cfg *Config) (*Machine, error) {
	m, err := machine.New(&cfg.Config)
	if err != nil {
		return nil, err
	}
	return &Machine{Machine: m, nccl: nccl.New(m, cfg.NCCL), cublas: blas.New(m), lt: blas.NewLt(m), cufile: cufile.New(m)}, nil
}

// NCCL returns the machine's NCCL, of the configured version.
func (m *Machine) NCCL() ncclapi.API { return m.nccl }

// CUBLAS returns the machine's cuBLAS.
func (m *Machine) CUBLAS() cublasapi.API { return m.cublas }

// CUBLASLt returns the machine's cuBLASLt, version 13.0.2.
func (m *Machine) CUBLASLt() cublasltapi.API { return m.lt }

// CuFile returns the machine's cuFile, version 1.15.
func (m *Machine) CuFile() cufileapi.API { return m.cufile }
