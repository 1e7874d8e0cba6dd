package cufile

import (
	"testing"

	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { virtualtest.Main(m) }

// A rig is a machine with the contexts of its devices retained.
type rig struct {
	*virtualtest.Rig
	m *machine.Machine
}

func newRig(t *testing.T, cfg machine.Config) *rig {
	t.Helper()
	m, err := machine.New(&cfg)
	require.NoError(t, err)
	t.Logf("seed %#x", m.Seed())
	return &rig{virtualtest.New(t, m.Driver(), cfg.Devices), m}
}
