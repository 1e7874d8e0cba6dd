package gds

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// TestVerifyFindsOtherBytes changes one byte on a device: whatever part it is of, the
// rank that has it is told, and no other.
func TestVerifyFindsOtherBytes(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, _ := bigCheckpoint(t)
		c := openCheckpoint(t, folder)
		g := localGroup(t, devs)
		for _, dim := range []int{0, 1} {
			all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(dim) }})
			require.NoError(t, err)
			name := c.Infos()[1].Name
			x, err := all[1].Tensor(name)
			require.NoError(t, err)
			last, err := view(all[1].slab, x.Offset()+x.Bytes()-1, 1)
			require.NoError(t, err)
			b := []byte{0}
			require.NoError(t, last.CopyTo(g.Stream(1), b))
			b[0]++
			require.NoError(t, last.CopyFrom(g.Stream(1), b))
			require.NoError(t, c.Verify(t.Context(), all[0]))
			err = c.Verify(t.Context(), all[1])
			require.ErrorContains(t, err, `tensor "`+name+`": SHA-256 of the part of rank 1 is `)
			require.NoError(t, closeAll(all))
		}
	})
}

// TestDigestsOfChangedFiles: the digest of a file that has changed is an error and not
// that of what is left, also in a comparison, and a digest is given up when it is not
// wanted any more.
func TestDigestsOfChangedFiles(t *testing.T) {
	folder, _ := bigCheckpoint(t)
	c := openCheckpoint(t, folder)
	info := c.Infos()[1]
	w, err := c.LoadOn(t.Context(), newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, w.Close()) }()
	_, err = c.SHA256(t.Context(), info.Name)
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("nobody waits for it")
	cancel(cause)
	_, err = c.SHA256(ctx, info.Name)
	require.ErrorIs(t, err, cause)

	at := c.where[info.Name]
	require.NoError(t, os.Truncate(info.File, c.headers[at.file].Tensors[at.tensor].End-1))
	_, err = c.SHA256(t.Context(), info.Name)
	require.ErrorIs(t, err, ErrChanged)
	require.ErrorContains(t, err, filepath.Base(info.File)+`: tensor "`+info.Name+`" at byte `)
	require.ErrorIs(t, c.Verify(t.Context(), w), ErrChanged)
}
