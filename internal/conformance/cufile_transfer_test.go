package conformance

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

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
	if r.api.Has(cufileapi.FuncSetStatsLevel) {
		var l1 cufileapi.StatsLevel1
		r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.GetStatsL1(&l1) })
		require.Positive(t, l1.ReadOps.OK)
		require.GreaterOrEqual(t, l1.ReadBytes, uint64(2*transferBytes))
		require.GreaterOrEqual(t, l1.WriteBytes, uint64(4096+777+5000))
	}
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

func (r *fileRig) testBatches(t *testing.T) {
	const each, many = 4096, 8
	h, f := r.file(t, each*many)
	defer r.api.HandleDeregister(h)
	want := data(each*many, each*many)
	s, p := r.stream(t, 0), r.alloc(t, 0, each*many)
	var b cufileapi.Batch
	for _, nr := range []uint32{0, 1000} {
		r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { _, res := r.api.BatchIOSetUp(nr); return res })
	}
	r.test(t, cufileapi.Success, func() (res cufileapi.Result) { b, res = r.api.BatchIOSetUp(many); return res })
	params := make([]cufileapi.IOParams, many+1)
	for i := range params {
		params[i] = cufileapi.IOParams{Mode: cufileapi.BatchMode, DevPtrBase: p, FileOffset: int64(i) * each,
			DevOffset: int64(many-1-i%many) * each, Size: each, Handle: h, Opcode: cufileapi.OpRead, Cookie: uintptr(100 + i)}
	}
	submit := func(want cufileapi.Result, params []cufileapi.IOParams) {
		t.Helper()
		r.test(t, want, func() cufileapi.Result { return r.api.BatchIOSubmit(b, params, 0) })
	}
	submit(cufileapi.InternalBatchSubmitError, params) // one too many
	submit(cufileapi.InternalBatchSubmitError, nil)
	submit(cufileapi.Success, params[:many])
	r.collect(t, b, many, func(e cufileapi.IOEvents) {
		require.Equal(t, cufileapi.Complete, e.Status)
		require.EqualValues(t, each, e.Ret)
	})
	got := r.download(t, 0, s, p, each*many)
	for i := range many {
		require.True(t, bytes.Equal(want[i*each:(i+1)*each], got[(many-1-i)*each:(many-i)*each]), "transfer %d", i)
	}
	// Past the end, at the end, and a write.
	params[0].FileOffset, params[1].FileOffset = 1<<30, each*many-10
	params[2].Opcode = cufileapi.OpWrite
	submit(cufileapi.Success, params[:3])
	r.collect(t, b, 3, func(e cufileapi.IOEvents) {
		require.Equal(t, cufileapi.Complete, e.Status)
		require.EqualValues(t, []int{0, 10, each}[e.Cookie-100], e.Ret)
	})
	file, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(r.download(t, 0, s, p, each*many)[(many-3)*each:(many-2)*each], file[2*each:3*each]))
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.BatchIOCancel(b) })
	r.api.BatchIODestroy(b)
	submit(cufileapi.InternalBatchSubmitError, params[:1])
}

// collect waits for n transfers of a batch, in any number of calls, and checks each one.
func (r *fileRig) collect(t *testing.T, b cufileapi.Batch, n int, look func(cufileapi.IOEvents)) {
	t.Helper()
	seen := map[uintptr]bool{}
	events := make([]cufileapi.IOEvents, n)
	_, res := r.api.BatchIOGetStatus(b, uint32(n+1), events, nil)
	require.Equal(t, cufileapi.InvalidValue, res)
	for len(seen) < n {
		got, res := r.api.BatchIOGetStatus(b, 1, events, &cufileapi.Timespec{Sec: 10})
		require.Equal(t, cufileapi.Success, res)
		require.Positive(t, got, "nothing within ten seconds")
		for _, e := range events[:got] {
			require.False(t, seen[e.Cookie], "transfer %d was told twice", e.Cookie)
			seen[e.Cookie] = true
			look(e)
		}
	}
	got, res := r.api.BatchIOGetStatus(b, 0, events, &cufileapi.Timespec{})
	require.Equal(t, cufileapi.Success, res)
	require.Zero(t, got)
}

// words are the page-locked parameters of a stream-ordered transfer.
type words struct {
	size                  uintptr
	fileOffset, devOffset int64
	done                  int64
}

func (r *fileRig) words(t *testing.T) *words {
	t.Helper()
	var p unsafe.Pointer
	r.do(t, 0, func() (res cudadrv.Result) { p, res = r.drv.MemHostAlloc(unsafe.Sizeof(words{}), 0); return res })
	t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.MemFreeHost(p) }) })
	*(*words)(p) = words{done: -77}
	return (*words)(p)
}

// testStreams checks that transfers run in stream order, and that parameters are
// read when the stream reaches the transfer.
func (r *fileRig) testStreams(t *testing.T) {
	const n = 1 << 20
	h, f := r.file(t, n)
	defer r.api.HandleDeregister(h)
	want := data(n, n)
	s, p := r.stream(t, 0), r.alloc(t, 0, n)
	w, back := r.words(t), r.words(t)
	enqueue := func(write bool, w *words, s cudadrv.Stream) {
		t.Helper()
		r.test(t, cufileapi.Success, func() cufileapi.Result {
			if write {
				return r.api.WriteAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &w.done, s)
			}
			return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &w.done, s)
		})
	}
	r.set(t, 0, s, p, 0xee, n)
	w.size, w.fileOffset = n, 0
	enqueue(false, w, s)
	require.True(t, bytes.Equal(want, r.download(t, 0, s, p, n)), "the read comes behind the fill and before the copy")
	require.EqualValues(t, n, w.done)

	r.set(t, 0, s, p, 0x11, n)
	back.size, back.fileOffset, back.devOffset = 5000, 1234, 100
	enqueue(true, back, s)
	r.sync(t, 0, s)
	require.EqualValues(t, -5, back.done, "an offset in memory that is not registered")
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.BufRegister(p, n, 0) })
	defer r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.BufDeregister(p) })
	enqueue(true, back, s)
	w.fileOffset = 500
	enqueue(false, w, s)
	r.sync(t, 0, s)
	require.EqualValues(t, 5000, back.done, "offset 1234")
	require.EqualValues(t, n-500, w.done, "the file ends early")
	copy(want[1234:], bytes.Repeat([]byte{0x11}, 5000))
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))

	r.testFixedParameters(t, h, p, w, want)
	*w = words{size: 4096}
	enqueue(false, w, 0)
	require.EqualValues(t, 4096, w.done, "without a stream the call is synchronous")
}

// testFixedParameters registers a stream for parameters that do not change after the call.
func (r *fileRig) testFixedParameters(t *testing.T, h cufileapi.Handle, p cudadrv.DevicePtr, w *words, want []byte) {
	t.Helper()
	const all = cufileapi.FixedBufOffset | cufileapi.FixedFileOffset | cufileapi.FixedFileSize | cufileapi.PageAlignedInputs
	s := r.stream(t, 0)
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.StreamRegister(s, all) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result { return r.api.StreamRegister(s, all) })
	*w = words{size: 8192, fileOffset: 4096, devOffset: 4096}
	r.test(t, cufileapi.Success, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, &w.size, &w.fileOffset, &w.devOffset, &w.done, s)
	})
	r.sync(t, 0, s)
	require.EqualValues(t, 8192, w.done)
	require.True(t, bytes.Equal(want[4096:4096+8192], r.download(t, 0, s, p, len(want))[4096:4096+8192]))
	r.test(t, cufileapi.Success, func() cufileapi.Result { return r.api.StreamDeregister(s) })
	r.test(t, cufileapi.InvalidValue, func() cufileapi.Result {
		return r.api.ReadAsync(h, p, nil, &w.fileOffset, &w.devOffset, &w.done, s)
	})
}
