package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
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

// TestVerifyRefusesOthers: weights that were converted, or of other tensors, cannot be
// compared with a checkpoint.
func TestVerifyRefusesOthers(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		s := newStream(t, devs[0])
		c := openCheckpoint(t, folder)
		w, err := c.LoadOn(t.Context(), s, &LoadConfig{DType: func(Info) memory.DType { return memory.Float64 }})
		require.NoError(t, err)
		require.ErrorIs(t, c.Verify(t.Context(), w), errors.ErrUnsupported)
		require.NoError(t, w.Close())
		require.ErrorIs(t, c.Verify(t.Context(), w), device.ErrClosed)
		require.ErrorContains(t, c.Verify(t.Context(), nil), "no weights given")

		w, err = c.LoadOn(t.Context(), s, nil)
		require.NoError(t, err)
		for _, info := range []safetensors.Tensor{
			{Name: "1.first", DType: safetensors.F32, Shape: []int{1024, 256}},
			{Name: "1.first", DType: safetensors.I32, Shape: []int{512, 512}},
			{Name: "other", DType: safetensors.F32, Shape: []int{512, 512}},
		} {
			other := openCheckpoint(t, writeCheckpoint(t, [][]made{{{info, list[0].data}}, list[1:]}))
			require.ErrorContains(t, other.Verify(t.Context(), w), `no tensor "1.first" of type float32 and shape [512 512]`)
		}
		require.NoError(t, w.Close())
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
	require.ErrorIs(t, err, gds.ErrChanged)
	require.ErrorContains(t, err, filepath.Base(info.File)+`: tensor "`+info.Name+`" at byte `)
	require.ErrorIs(t, c.Verify(t.Context(), w), gds.ErrChanged)
}
