package checkpoint

import (
	"testing"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var newStream, hostBytes, randomBytes = streamtest.NewStream, streamtest.Host, streamtest.Random
