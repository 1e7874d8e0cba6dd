package strided_test

import (
	"testing"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/internal/testgpu"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// The PTX belongs to strided.cu.
func TestPTX(t *testing.T) {
	testgpu.CheckPTX(t, "strided.ptx.zst", strided.Packed, []cudacc.Source{{Name: "copy", CUDA: strided.Source}})
}
