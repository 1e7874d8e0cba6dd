package nccl

import (
	"testing"

	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// A rig is a machine with NCCL and the contexts of its devices retained.
type rig struct {
	*virtualtest.Rig
	m   *machine.Machine
	lib *lib
}

func newRig(t *testing.T, cfg machine.Config) *rig {
	t.Helper()
	return newRigWith(t, cfg, Config{})
}

// newNetworkRig creates a rig whose ranks listen on an IP address.
func newNetworkRig(t *testing.T, cfg machine.Config, ip string) *rig {
	t.Helper()
	return newRigWith(t, cfg, Config{Network: ip})
}

func newRigWith(t *testing.T, cfg machine.Config, of Config) *rig {
	t.Helper()
	m, err := machine.New(&cfg)
	require.NoError(t, err)
	t.Logf("seed %#x", m.Seed())
	return &rig{virtualtest.New(t, m.Driver(), cfg.Devices), m, New(m, of).(*lib)}
}
