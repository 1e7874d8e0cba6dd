package checkpoint

import (
	"testing"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/buffers"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var newStream, hostBytes, randomBytes = buffers.NewStream, buffers.Host, buffers.Random
