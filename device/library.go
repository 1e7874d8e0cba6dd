package device

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/nvrtcapi"
)

// A Library is a shared library that Chorus uses.
type Library struct {
	Name    string // "CUDA driver", "NCCL", "NVRTC", "cuBLAS", "cuBLASLt" or "cuFile"
	Version string // as the library reports it, or ""
	Path    string // the file that was loaded, or "built in" for virtual devices
	Err     error  // why it cannot be used, or nil
}

// Libraries opens every library that Chorus can use and returns which file each one came
// from. If a library is missing, its Err is set.
func (s *System) Libraries() []Library {
	sys := gpu.SystemOf(s)
	libs := []Library{s.describe("CUDA driver", sys.Driver, nil, func() (string, error) {
		v, r := sys.Driver.DriverGetVersion()
		if r != cudadrv.Success {
			return "", s.fail("cuDriverGetVersion", -1, r)
		}
		return fmt.Sprintf("CUDA %d.%d", v/1000, v%1000/10), nil
	})}
	nccl, err := sys.NCCL()
	libs = append(libs, s.describe("NCCL", nccl, err, func() (string, error) {
		v, r := nccl.GetVersion()
		if r != ncclapi.Success {
			return "", fmt.Errorf("ncclGetVersion: %w", r)
		}
		return ncclapi.VersionText(v), nil
	}))
	if sys.Machine == nil { // virtual devices have no compiler
		rtc, err := sys.NVRTC()
		libs = append(libs, s.describe("NVRTC", rtc, err, func() (string, error) {
			major, minor, r := rtc.Version()
			if r != nvrtcapi.Success {
				return "", fmt.Errorf("nvrtcVersion: %w", r)
			}
			return fmt.Sprintf("%d.%d", major, minor), nil
		}))
	}
	blas, err := sys.CUBLAS()
	libs = append(libs, s.describe("cuBLAS", blas, err, func() (string, error) { return "", nil }))
	lt, err := sys.CUBLASLt()
	libs = append(libs, s.describe("cuBLASLt", lt, err, func() (string, error) {
		v := lt.GetVersion()
		return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100), nil
	}))
	file, err := sys.CuFile()
	return append(libs, s.describe("cuFile", file, err, func() (string, error) {
		v, r := file.GetVersion()
		if r != cufileapi.Success {
			return "", fmt.Errorf("cuFileGetVersion: %w", r)
		}
		return cufileapi.VersionText(v), nil
	}))
}

func (s *System) describe(name string, lib any, err error, version func() (string, error)) Library {
	l := Library{Name: name, Err: err}
	if err != nil {
		return l
	}
	l.Path = "built in"
	if f, ok := lib.(interface{ Path() string }); ok {
		l.Path = f.Path()
	}
	l.Version, l.Err = version()
	return l
}
