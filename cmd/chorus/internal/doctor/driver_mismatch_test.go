package doctor

import (
	"errors"
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestDriverMismatch(t *testing.T) {
	try(t, driverMismatch,
		noGPU,
		change{"other versions", func(w *world) { w.cuda.Path = "/usr/lib/libcuda.so.570.86.10" }, Fail, "libcuda 570.86.10"},
		change{"a forward-compatible libcuda", func(w *world) { w.cuda.Path = "/usr/local/cuda/compat/libcuda.so.590.10" }, Pass, "590.10"},
		change{"cuInit 803", func(w *world) { w.cuda.Code = 803 }, Fail, "same version"},
		change{"cuInit 999", func(w *world) { w.cuda.Code, w.cuda.Meaning = 999, "unknown error" }, Fail, "cuInit returns 999: unknown error"},
		change{"cuInit 802", func(w *world) { w.cuda.Code = 802 }, Unknown, "fabric-manager"},
		change{"no libcuda", func(w *world) { w.cuda = CUDA{Err: errors.New("no usable library")} }, Fail, "no usable library"},
		change{"NVML fails", func(w *world) {
			w.NVML = func() ([]*GPU, error) { return nil, &nvml.Error{Op: "nvmlInit_v2", Code: 18, Text: "mismatch"} }
		}, Fail, "(18)"},
		change{"no NVML", func(w *world) {
			w.NVML = func() ([]*GPU, error) { return nil, errors.New("no usable library for NVML") }
		}, Unknown, "no usable library for NVML"},
		change{"another text", func(w *world) { w.put("proc/driver/nvidia/version", "?") }, Unknown, "has no version"},
	)
}
