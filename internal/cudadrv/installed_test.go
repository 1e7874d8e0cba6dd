package cudadrv

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

// storePTX is a kernel that stores its second parameter where the first says.
const storePTX = `.version 7.0
.target sm_75
.address_size 64
.visible .entry store(.param .u64 p, .param .u32 v) {
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [p];
	ld.param.u32 %r1, [v];
	cvta.to.global.u64 %rd2, %rd1;
	st.global.u32 [%rd2], %r1;
	ret;
}
`

// The installed driver takes every call as this package passes it: the recorder
// shows what arrives, and here the driver says that it is what it wants.
func TestInstalledDriver(t *testing.T) {
	l, err := Open()
	dltest.RequireInstalled(t, err)
	ok := func(r Result) {
		t.Helper()
		require.Equal(t, Success, r, r.Meaning())
	}
	runtime.LockOSThread() // the context belongs to the thread
	defer runtime.UnlockOSThread()
	if r := l.Init(); r == ErrorNoDevice {
		t.Skip(r.Meaning())
	} else {
		ok(r)
	}
	for i, s := range symbols {
		require.True(t, l.Has(fn(i)), s.Name)
	}
	version, r := l.DriverGetVersion()
	ok(r)
	count, r := l.DeviceGetCount()
	ok(r)
	require.Positive(t, count)
	d, r := l.DeviceGet(0)
	ok(r)
	name, r := l.DeviceGetName(d)
	ok(r)
	uuid, r := l.DeviceGetUUID(d)
	ok(r)
	require.NotZero(t, uuid)
	bus, r := l.DeviceGetPCIBusID(d)
	ok(r)
	require.Regexp(t, `^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.`, bus)
	warp, r := l.DeviceGetAttribute(AttrWarpSize, d)
	ok(r)
	require.Equal(t, int32(32), warp)
	t.Logf("CUDA %s at %s: %d × %s", versionText(version), l.Path(), count, name)

	ctx, r := l.DevicePrimaryCtxRetain(d)
	ok(r)
	defer func() { ok(l.DevicePrimaryCtxRelease(d)) }()
	ok(l.CtxSetCurrent(ctx))
	defer func() { ok(l.CtxSetCurrent(0)) }()
	current, r := l.CtxGetCurrent()
	ok(r)
	require.Equal(t, ctx, current)
	free, total, r := l.MemGetInfo()
	ok(r)
	require.Less(t, free, total)
	least, greatest, r := l.CtxGetStreamPriorityRange()
	ok(r)
	require.Less(t, greatest, least)

	s, r := l.StreamCreateWithPriority(StreamNonBlocking, greatest)
	ok(r)
	defer func() { ok(l.StreamDestroy(s)) }()
	begin, r := l.EventCreate(EventDefault)
	ok(r)
	end, r := l.EventCreate(EventDefault)
	ok(r)
	defer func() { ok(l.EventDestroy(begin)); ok(l.EventDestroy(end)) }()
	m, r := l.ModuleLoadData([]byte(storePTX))
	ok(r)
	defer func() { ok(l.ModuleUnload(m)) }()
	f, r := l.ModuleGetFunction(m, "store")
	ok(r)
	_, r = l.ModuleGetFunction(m, "none")
	require.Equal(t, ErrorNotFound, r)

	host, r := l.MemHostAlloc(4096, MemHostAllocPortable)
	ok(r)
	defer func() { ok(l.MemFreeHost(host)) }()
	p, r := l.MemAllocAsync(8, s)
	ok(r)
	value := new(uint32)
	*value = 0xabcd1234
	params := [2]unsafe.Pointer{unsafe.Pointer(&p), unsafe.Pointer(value)}
	var pin runtime.Pinner
	pin.Pin(&p)
	pin.Pin(value)
	defer pin.Unpin()
	ok(l.EventRecord(begin, s))
	ok(l.MemsetD8Async(p, 0x5a, 8, s))
	ok(l.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(&params)))
	ok(l.MemcpyDtoHAsync(host, p, 8, s))
	ok(l.MemFreeAsync(p, s))
	ok(l.EventRecord(end, s))
	ok(l.EventSynchronize(end))
	ok(l.StreamQuery(s))
	ms, r := l.EventElapsedTime(begin, end)
	ok(r)
	require.Positive(t, ms)
	require.Equal(t, [2]uint32{0xabcd1234, 0x5a5a5a5a}, *(*[2]uint32)(host))
}
