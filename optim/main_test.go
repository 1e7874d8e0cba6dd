package optim_test

import (
	"testing"

	"github.com/gochorus/chorus/internal/testgpu"
)

func TestMain(m *testing.M) { testgpu.Main(m) }
