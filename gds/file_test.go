package gds

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

func TestReadAt(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx, s := testgpu.Context(t), newStream(t, devs[0])
		want := randomBytes(9<<20 + 123)
		f := openFile(t, writeFile(t, want), nil)
		x := makeBytes(t, s, len(want))
		n, err := f.ReadAt(ctx, s, x, 0)
		require.NoError(t, err)
		require.Equal(t, len(want), n)
		require.True(t, string(want) == string(hostBytes(t, s, x)))

		poison(t, s, x)
		n, err = f.ReadAt(ctx, s, x, 1000)
		require.Equal(t, io.EOF, err)
		require.Equal(t, len(want)-1000, n)
		got := hostBytes(t, s, x)
		require.True(t, string(want[1000:]) == string(got[:n]))
		for _, b := range got[n:] {
			require.EqualValues(t, 0xa5, b, "what lies behind the file's end is not touched")
		}
		n, err = f.ReadAt(ctx, s, x, int64(len(want)))
		require.Equal(t, io.EOF, err)
		require.Zero(t, n)
		n, err = f.ReadAt(ctx, s, x, int64(len(want))+1)
		require.Equal(t, io.EOF, err)
		require.Zero(t, n)
		n, err = f.ReadAt(ctx, s, x.Slice(0, 0), 5)
		require.NoError(t, err)
		require.Zero(t, n)
	})
}

func TestCreate(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx, s := testgpu.Context(t), newStream(t, devs[0])
		want := randomBytes(5<<20 + 7)
		x, err := memory.MakeFrom(s, want)
		require.NoError(t, err)
		defer x.Close()
		path := filepath.Join(t.TempDir(), "file")
		f, err := Create(path, nil)
		require.NoError(t, err)
		n, err := f.WriteAt(ctx, s, x, 0)
		require.NoError(t, err)
		require.Equal(t, len(want), n)
		_, err = os.Stat(path)
		require.ErrorIs(t, err, os.ErrNotExist)
		require.NoError(t, f.Commit(ctx))
		require.NoError(t, f.Close())
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, string(want) == string(got))
	})
}
