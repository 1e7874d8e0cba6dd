package cufile

import (
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// entries are n reads of 64 bytes, whose cookies count them.
func (r *fileRig) entries(h cufileapi.Handle, p cudadrv.DevicePtr, n int) []cufileapi.IOParams {
	params := make([]cufileapi.IOParams, n)
	for i := range params {
		params[i] = cufileapi.IOParams{Mode: cufileapi.BatchMode, DevPtrBase: p, DevOffset: int64(64 * i), FileOffset: int64(64 * i),
			Size: 64, Handle: h, Opcode: cufileapi.OpRead, Cookie: uintptr(i)}
	}
	return params
}

func (r *fileRig) batch(n uint32) (b cufileapi.Batch) {
	r.T.Helper()
	r.fine(r.with(0, func() (res cufileapi.Result) { b, res = r.api.BatchIOSetUp(n); return res }))
	return b
}

func (r *fileRig) submit(b cufileapi.Batch, params []cufileapi.IOParams) cufileapi.Result {
	r.T.Helper()
	return r.with(0, func() cufileapi.Result { return r.api.BatchIOSubmit(b, params, 0) })
}

// wait collects n transfers by their cookies.
func (r *fileRig) wait(b cufileapi.Batch, n int) map[uintptr]cufileapi.IOEvents {
	r.T.Helper()
	seen := map[uintptr]cufileapi.IOEvents{}
	for len(seen) < n {
		events := make([]cufileapi.IOEvents, 1+len(seen)%2)
		got, res := r.api.BatchIOGetStatus(b, 1, events, nil)
		r.fine(res)
		for _, e := range events[:got] {
			seen[e.Cookie] = e
		}
	}
	return seen
}

func TestCuFileBatch(t *testing.T) {
	r := newFileRig(t, machine.Config{Faults: "short@cuFileBatchIOSubmit#2, async@cuFileBatchIOSubmit#3=EIO, " +
		"async@cuFileBatchIOSubmit#4=CU_FILE_IO_ERROR"})
	h, p, s := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.Stream(0)
	b := r.batch(8)
	for _, want := range []struct {
		status cufileapi.Status
		ret    int64
	}{{cufileapi.Complete, 64}, {cufileapi.Complete, 32}, {cufileapi.Failed, -int64(syscall.EIO)}, {cufileapi.Failed, -int64(cufileapi.IOError)}} {
		r.fine(r.submit(b, r.entries(h, p, 5)))
		for _, e := range r.wait(b, 5) {
			require.Equal(t, want.status, e.Status)
			require.Equal(t, want.ret, int64(e.Ret))
		}
	}
	for next, tries := r.entries(h, p, 8), 0; ; tries++ {
		require.Less(t, tries, 50, "transfers end in any order")
		r.fine(r.submit(b, next))
		events := make([]cufileapi.IOEvents, 8)
		n, res := r.api.BatchIOGetStatus(b, 8, events, nil)
		r.fine(res)
		require.EqualValues(t, 8, n)
		if !slices.IsSortedFunc(events, func(a, b cufileapi.IOEvents) int { return int(a.Cookie) - int(b.Cookie) }) {
			break
		}
	}
	require.Len(t, virtualtest.Download[byte](r.Rig, 0, s, p, 320), 320, "the host knows that the transfers have ended")

	good := func() []cufileapi.IOParams { return r.entries(h, p, 2) }
	for name, spoil := range map[string]func(p *cufileapi.IOParams){
		"mode":    func(p *cufileapi.IOParams) { p.Mode = 0 },
		"opcode":  func(p *cufileapi.IOParams) { p.Opcode = 2 },
		"handle":  func(p *cufileapi.IOParams) { p.Handle++ },
		"offset":  func(p *cufileapi.IOParams) { p.FileOffset = -1 },
		"address": func(p *cufileapi.IOParams) { p.DevPtrBase = 0 },
	} {
		params := good()
		spoil(&params[1])
		require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, params), name)
	}
	require.Equal(t, cufileapi.InvalidValue, r.with(0, func() cufileapi.Result { return r.api.BatchIOSubmit(b, good(), 1) }))
	_, res := r.api.BatchIOGetStatus(b, 1, make([]cufileapi.IOEvents, 1), nil)
	require.Equal(t, cufileapi.InvalidValue, res, "there is nothing to wait for")
	_, res = r.api.BatchIOGetStatus(b+1, 0, nil, nil)
	require.Equal(t, cufileapi.InternalBatchStatusError, res)
	require.Equal(t, cufileapi.InvalidValue, r.api.BatchIOCancel(b+1))
	r.api.BatchIODestroy(b)
	require.Empty(t, r.m.Reports())
	r.api.BatchIODestroy(b)
	r.reported("which is not a batch")
}

// Transfers take up room until they have been told of.
func TestCuFileBatchCapacity(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.batch(4)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, r.entries(h, p+256, 2)))
	events := make([]cufileapi.IOEvents, 4)
	n, res := r.api.BatchIOGetStatus(b, 3, events, nil)
	r.fine(res)
	require.EqualValues(t, 3, n)
	r.fine(r.submit(b, r.entries(h, p, 4)))
	require.Equal(t, cufileapi.InternalBatchSubmitError, r.submit(b, r.entries(h, p+256, 1)))
	r.wait(b, 4)
}

func TestCuFileBatchCancel(t *testing.T) {
	r := newFileRig(t, machine.Config{Faults: "hang@cuFileBatchIOSubmit#1, cuFileBatchIOSubmit#4=CU_FILE_BATCH_SUBMIT_FAILED"})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.batch(8)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	second := r.entries(h, p+512, 2)
	for i := range second {
		second[i].Cookie += 10
	}
	r.fine(r.submit(b, second))
	require.Equal(t, cufileapi.Complete, r.wait(b, 2)[11].Status)

	events := make([]cufileapi.IOEvents, 8)
	begin := time.Now()
	n, res := r.api.BatchIOGetStatus(b, 1, events, &cufileapi.Timespec{Nsec: 20e6})
	r.fine(res)
	require.Zero(t, n, "nothing happened in the time given")
	require.GreaterOrEqual(t, time.Since(begin), 20*time.Millisecond)

	r.fine(r.api.BatchIOCancel(b))
	for _, e := range r.wait(b, 3) {
		require.Equal(t, cufileapi.Canceled, e.Status)
		require.Zero(t, e.Ret)
	}
	r.fine(r.submit(b, r.entries(h, p, 1)))
	require.Equal(t, cufileapi.Complete, r.wait(b, 1)[0].Status, "only what was there is canceled")
	require.Equal(t, cufileapi.BatchSubmitFailed, r.submit(b, r.entries(h, p, 1)))
	r.api.BatchIODestroy(b)
	r.api.HandleDeregister(h)
	require.Empty(t, r.m.Reports())
}

func TestCuFileBatchGivenUpInFlight(t *testing.T) {
	r := newFileRig(t, machine.Config{Faults: "hang@cuFileBatchIOSubmit#1"})
	h, p, b := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.batch(8)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	r.api.BatchIODestroy(b)
	r.reported("cuFileBatchIODestroy destroyed a batch with 3 unfinished transfers")

	r = newFileRig(t, machine.Config{Faults: "hang@cuFileBatchIOSubmit#1"})
	h, p, b = r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.batch(8)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	r.api.HandleDeregister(h)
	r.reported("cuFileHandleDeregister deregistered")
	r.fine(r.api.DriverClose())
	require.Len(t, r.m.Reports(), 2)
	require.Contains(t, r.m.Reports()[1], "cuFileDriverClose_v2 destroyed a batch")
}

// What ends after its batch was given up leaves nothing behind.
func TestCuFileBatchEndsAlone(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, p := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024)
	for range 20 {
		b := r.batch(8)
		r.fine(r.submit(b, r.entries(h, p, 8)))
		r.api.BatchIODestroy(b)
		given := poll.UntilNoLaterThan(10*time.Second, func() bool {
			r.m.Lock()
			defer r.m.Unlock()
			return r.m.Clocks() == 0
		})
		require.True(t, given, "every transfer gives its slot back")
	}
}

// A batch comes after what the host has waited for when it was submitted, and the
// host knows of its end once it was told.
func TestCuFileBatchRaces(t *testing.T) {
	r := newFileRig(t, machine.Config{})
	h, p, b, s := r.register(r.open(1024, os.O_RDWR)), r.Alloc(0, 1024), r.batch(8), r.Stream(0)
	r.fine(r.submit(b, r.entries(h, p, 4)))
	r.wait(b, 4)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 1024, s) })
	r.Sync(0, s)
	require.Empty(t, r.m.Reports())
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 1024, s) })
	r.fine(r.submit(b, r.entries(h, p, 1)))
	r.wait(b, 1)
	r.On(0, r.Drv.CtxSynchronize)
	r.reported("cuFileBatchIOSubmit on the host")
}
