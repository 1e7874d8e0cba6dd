package backend

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

// A VirtualMachine is a machine of virtual devices with its libraries.
type VirtualMachine struct {
	*machine.Machine
	nccl   ncclapi.API
	cublas cublasapi.API
	lt     cublasltapi.API
	cufile cufileapi.API
}

// A VirtualConfig describes a machine and its NCCL.
type VirtualConfig struct {
	machine.Config
	NCCL nccl.Config
}

// NewVirtual creates a machine. It fails only if the configuration is invalid.
func NewVirtual(cfg *VirtualConfig) (*VirtualMachine, error) {
	m, err := machine.New(&cfg.Config)
	if err != nil {
		return nil, err
	}
	return &VirtualMachine{Machine: m, nccl: nccl.New(m, cfg.NCCL), cublas: blas.New(m), lt: blas.NewLt(m), cufile: cufile.New(m)}, nil
}

// NCCL returns the machine's NCCL, of the configured version.
func (m *VirtualMachine) NCCL() ncclapi.API { return m.nccl }

// CUBLAS returns the machine's cuBLAS.
func (m *VirtualMachine) CUBLAS() cublasapi.API { return m.cublas }

// CUBLASLt returns the machine's cuBLASLt, version 13.0.2.
func (m *VirtualMachine) CUBLASLt() cublasltapi.API { return m.lt }

// CuFile returns the machine's cuFile, version 1.15.
func (m *VirtualMachine) CuFile() cufileapi.API { return m.cufile }
