package comm_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

// A keyed Rendezvous has keys of a secret, like a session of package cluster.
type keyed struct {
	*board
	key []byte
	err error
}

func (k *keyed) Key(string) ([]byte, error) { return k.key, k.err }

func TestEncryptedJoin(t *testing.T) {
	t.Setenv("CHORUS_NCCL_ENCRYPT", "yes")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.32.3"})
	joinBy := func(of func(b *board) comm.Rendezvous) []error {
		gs, errs := make([]*comm.Group, 2), make([]error, 2)
		var wg sync.WaitGroup
		for i, b := range boards(t.Context(), 2) {
			wg.Go(func() { gs[i], errs[i] = comm.Join(t.Context(), of(b), devs[i], nil) })
		}
		wg.Wait()
		for _, g := range gs {
			require.NoError(t, g.Close())
		}
		return errs
	}
	for _, err := range joinBy(func(b *board) comm.Rendezvous { return b }) {
		require.ErrorContains(t, err, "CHORUS_NCCL_ENCRYPT is yes, but a")
	}
	none := errors.New("the job has no secret")
	for _, err := range joinBy(func(b *board) comm.Rendezvous { return &keyed{board: b, err: none} }) {
		require.ErrorContains(t, err, none.Error()) // of this rank, or of the other one as text
	}
	require.NoError(t, errors.Join(joinBy(func(b *board) comm.Rendezvous { return &keyed{board: b, key: make([]byte, 32)} })...))
	require.ErrorContains(t, nccl.SetEncryption(devs[0], nil), "a key of 0 bytes")
	require.ErrorIs(t, nccl.SetEncryption(devs[0], []byte("another key of 32 bytes or more..")), nccl.ErrorInvalidUsage, "the key is set")
}
