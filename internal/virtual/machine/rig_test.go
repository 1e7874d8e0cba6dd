package machine

import (
	"testing"

	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// A rig is a machine with the contexts of its devices retained.
type rig struct {
	*virtualtest.Rig
	m *Machine
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	m, err := New(&cfg)
	require.NoError(t, err)
	t.Logf("seed %#x", m.Seed())
	return &rig{virtualtest.New(t, m.Driver(), cfg.Devices), m}
}
