package tensor_test

import (
	"testing"

	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/internal/ptxtest"
	"github.com/gochorus/chorus/tensor"
)

// The PTX belongs to tensor.cu.
func TestPTX(t *testing.T) {
	ptxtest.Check(t, "tensor.ptx.zst", tensor.Packed, []ptx.Source{{Name: "copy", CUDA: tensor.Source}})
}
