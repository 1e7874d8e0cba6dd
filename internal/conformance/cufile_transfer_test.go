package conformance

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/stretchr/testify/require"
)

// data returns random bytes, so that a wrong offset is detected.
func data(n int, seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(rng.Uint32())
	}
	return p
}

// requireSame fails at the first different byte.
func requireSame(t *testing.T, want, got []byte, format string, args ...any) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if want[i] != got[i] {
			require.Failf(t, "bytes differ", "byte %d of %d is %#x instead of %#x: %s", i, len(want), got[i], want[i], fmt.Sprintf(format, args...))
		}
	}
}

// read and write call cuFile with the context bound.
func (r *fileRig) read(t *testing.T, h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	t.Helper()
	r.on(t, 0, func() cudadrv.Result {
		n, err = r.api.Read(h, p, bytes, fileOffset, devOffset)
		return cudadrv.Success
	})
	return n, err
}

func (r *fileRig) write(t *testing.T, h cufileapi.Handle, p cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	t.Helper()
	r.on(t, 0, func() cudadrv.Result {
		n, err = r.api.Write(h, p, bytes, fileOffset, devOffset)
		return cudadrv.Success
	})
	return n, err
}

// transferBytes is the size of the file of testTransfers.
const transferBytes = 300_001

// testTransfers reads and writes at aligned and unaligned offsets, with
// registered and unregistered memory.
func (r *fileRig) testTransfers(t *testing.T) {
	h, f := r.file(t, transferBytes)
	defer r.api.HandleDeregister(h)
	want := data(transferBytes, transferBytes)
	p := r.alloc(t, 0, transferBytes+4096)
	r.testReads(t, h, p, want)
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.BufRegister(p, transferBytes+4096, 0) })
	r.testReads(t, h, p, want)
	_, err := r.read(t, h, p, transferBytes, 0, 8192)
	require.ErrorIs(t, err, cufileapi.InvalidMappingRange)
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.BufDeregister(p) })
	r.testWrites(t, h, f.Name(), p, want)
	r.testWriteOnly(t, f.Name(), p)
}

// testReads reads a file that contains want.
func (r *fileRig) testReads(t *testing.T, h cufileapi.Handle, p cudadrv.DevicePtr, want []byte) {
	t.Helper()
	const size = transferBytes
	s := r.stream(t, 0)
	for _, c := range []struct {
		bytes        uintptr
		fileOff, dev int64
	}{
		{4096, 0, 0}, {100_000, 4096, 8192}, {1, 7, 3}, {65_537, 1001, 513}, {8192, size - 100, 64},
		{4096, size, 0}, {4096, 1 << 30, 0}, {size, 0, 4096}, {0, 0, 0},
	} {
		r.set(t, 0, s, p, 0xee, size+4096)
		r.sync(t, 0, s)
		n, err := r.read(t, h, p, c.bytes, c.fileOff, c.dev)
		require.NoError(t, err)
		expect := want[min(c.fileOff, size):min(c.fileOff+int64(c.bytes), size)]
		require.EqualValues(t, len(expect), n)
		got := r.download(t, 0, s, p, size+4096)
		whole := bytes.Repeat([]byte{0xee}, size+4096)
		copy(whole[c.dev:], expect)
		// Memory beyond the end of the file may contain anything.
		copy(whole[c.dev+n:c.dev+int64(c.bytes)], got[c.dev+n:])
		requireSame(t, whole, got, "%+v", c)
	}
	_, err := r.read(t, h, p, 16, -1, 0)
	require.ErrorIs(t, err, cufileapi.InvalidValue)
	_, err = r.read(t, h, 0, 16, 0, 0)
	require.Error(t, err)
}

// testWrites changes a file that contains want.
func (r *fileRig) testWrites(t *testing.T, h cufileapi.Handle, path string, p cudadrv.DevicePtr, want []byte) {
	t.Helper()
	s, fresh := r.stream(t, 0), data(transferBytes, 99)
	r.upload(t, 0, s, p, fresh)
	r.sync(t, 0, s)
	for _, c := range []struct {
		bytes        uintptr
		fileOff, dev int64
	}{{4096, 8192, 0}, {777, 20_001, 13}, {5000, transferBytes - 10, 100}} {
		n, err := r.write(t, h, p, c.bytes, c.fileOff, c.dev)
		require.NoError(t, err)
		require.EqualValues(t, c.bytes, n)
		if grown := int(c.fileOff) + int(c.bytes); grown > len(want) {
			want = append(want, make([]byte, grown-len(want))...)
		}
		copy(want[c.fileOff:], fresh[c.dev:c.dev+int64(c.bytes)])
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

func (r *fileRig) testWriteOnly(t *testing.T, path string, p cudadrv.DevicePtr) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	h, res := r.register(t, f)
	require.Equal(t, cufileapi.Success, res)
	_, err = r.read(t, h, p, 16, 0, 0)
	require.ErrorIs(t, err, cufileapi.InvalidFileOpenFlag)
	_, err = r.write(t, h, p, 16, 0, 0)
	require.NoError(t, err)
	r.api.HandleDeregister(h)
}
