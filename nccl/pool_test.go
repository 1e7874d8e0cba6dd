package nccl

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A journal has what NCCL and an Allocator were asked, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(what string, ptr uint64, bytes int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, strings.TrimSuffix(fmt.Sprintf("%s %#x %d", what, ptr, bytes), " 0"))
}

// take returns the lines since the last time.
func (j *journal) take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := j.lines
	j.lines = nil
	return lines
}

// spy writes down the registrations at an NCCL.
type spy struct {
	ncclapi.API
	journal
	at map[ncclapi.RegID]uint64
}

func (s *spy) CommRegister(c ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr) (ncclapi.RegID, ncclapi.Result) {
	id, r := s.API.CommRegister(c, p, bytes)
	if r == ncclapi.Success {
		s.add("register", uint64(p), int(bytes))
		s.at[id] = uint64(p)
	}
	return id, r
}

func (s *spy) CommDeregister(c ncclapi.Comm, id ncclapi.RegID) ncclapi.Result {
	s.add("deregister", s.at[id], 0)
	return s.API.CommDeregister(c, id)
}

// spied is Allocator that writes down what it gives out.
type spied struct{ *journal }

func (a spied) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	p, err := Allocator.Alloc(s, bytes)
	if err == nil {
		a.add("alloc", p, bytes)
	}
	return p, err
}

func (a spied) Free(s *stream.Stream, ptr uint64, bytes int) error {
	a.add("free", ptr, bytes)
	return Allocator.Free(s, ptr, bytes)
}

// alone makes a communicator of one rank, the journal of its NCCL and a pool.
func registering(t *testing.T, d *device.Device) (*Communicator, *spy, *stream.Stream, *memory.Pool) {
	t.Helper()
	s := streamtest.NewStream(t, d)
	cs, err := NewCommunicators(testgpu.Context(t), []*device.Device{d}, nil)
	require.NoError(t, err)
	c := cs[0]
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	w := &spy{API: c.api, at: map[ncclapi.RegID]uint64{}}
	c.api = w
	p := memory.NewPool(&memory.PoolConfig{Allocator: spied{&w.journal}})
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return c, w, s, p
}

func makeIn(t *testing.T, p *memory.Pool, s *stream.Stream, n int) (x memory.Slice[float32], err error) {
	t.Helper()
	err = p.Use(s, func() (err error) {
		x, err = memory.Make[float32](s, n)
		return err
	})
	return x, err
}

// Segments that are there and those that come are registered, those that go are
// deregistered before they are freed, and collectives may use them.
func TestRegisterPool(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		c, w, s, p := registering(t, devs[0])
		x, err := makeIn(t, p, s, 1000)
		require.NoError(t, err)
		first := p.Snapshot()[0].Address
		require.Equal(t, []string{fmt.Sprintf("alloc %#x 2097152", first)}, w.take())
		require.NoError(t, c.RegisterPool(p))
		require.Equal(t, []string{fmt.Sprintf("register %#x 2097152", first)}, w.take())
		require.NoError(t, c.RegisterPool(p), "once is enough")
		require.Empty(t, w.take())
		y, err := makeIn(t, p, s, 1<<20)
		require.NoError(t, err)
		require.Equal(t, []string{fmt.Sprintf("alloc %#x 20971520", y.Ptr()), fmt.Sprintf("register %#x 20971520", y.Ptr())}, w.take())
		require.NoError(t, x.CopyFrom(s, make([]float32, 1000)))
		require.NoError(t, AllReduce(c, s, y.Slice(0, 1000), x, Sum))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		gone := y.Ptr()
		require.NoError(t, y.Close())
		require.Empty(t, w.take(), "cached, and known")
		require.NoError(t, memory.EmptyCache(devs[0]))
		require.Empty(t, w.take(), "an open pool stays mapped")
		require.NoError(t, c.DeregisterPool(p))
		require.ElementsMatch(t, []string{fmt.Sprintf("deregister %#x", first), fmt.Sprintf("deregister %#x", gone)}, w.take())
		require.NoError(t, c.DeregisterPool(p))
		y, err = makeIn(t, p, s, 6<<20)
		require.NoError(t, err)
		require.NoError(t, y.Close())
		require.Len(t, w.take(), 1, "nobody is told any more")
		require.NoError(t, c.RegisterPool(p))
		require.Len(t, w.take(), 3)
		require.NoError(t, c.Close())
		require.NoError(t, x.Close())
		require.NoError(t, p.Close(), "the end of the communicator was the end of its registrations")
		require.ErrorIs(t, c.RegisterPool(p), device.ErrClosed)
		require.NoError(t, c.DeregisterPool(p))
	})
}

// Memory of other devices is nothing to a communicator.
func TestRegisterPoolOfTwoDevices(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	c, w, s, p := registering(t, devs[0])
	require.NoError(t, c.RegisterPool(p))
	for _, on := range []*stream.Stream{s, streamtest.NewStream(t, devs[1])} {
		x, err := makeIn(t, p, on, 10)
		require.NoError(t, err)
		require.NoError(t, x.Close())
	}
	text := strings.Join(w.take(), "\n")
	require.Equal(t, 2, strings.Count(text, "alloc "))
	require.Equal(t, 1, strings.Count(text, "register "))
}

// What NCCL refuses is not the pool's memory.
func TestRegisterPoolWithFaults(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "ncclCommRegister#2=ncclSystemError,ncclCommRegister#5=ncclSystemError"})
	c, w, s, p := registering(t, devs[0])
	x, err := makeIn(t, p, s, 10)
	require.NoError(t, err)
	y, err := makeIn(t, p, s, 1<<20)
	require.NoError(t, err)
	w.take()
	require.ErrorIs(t, c.RegisterPool(p), ErrorSystem)
	text := strings.Join(w.take(), "\n")
	require.Equal(t, 1, strings.Count(text, "deregister "), "all or nothing: %s", text)
	require.NoError(t, y.Close())
	require.NoError(t, c.RegisterPool(p))
	w.take()
	_, err = makeIn(t, p, s, 6<<20)
	require.ErrorIs(t, err, ErrorSystem)
	require.ErrorContains(t, err, "memory: allocate 25165824 bytes on "+devs[0].String())
	lines := w.take()
	require.Len(t, lines, 2)
	require.Equal(t, strings.Replace(lines[0], "alloc", "free", 1), lines[1])
	require.Equal(t, 22<<20, p.Reserved())
	y, err = makeIn(t, p, s, 6<<20)
	require.NoError(t, err, "it was only once")
	require.NoError(t, y.Close())
	require.NoError(t, x.Close())
}

func TestRegisterPoolRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	c, _, s, p := registering(t, devs[0])
	require.ErrorContains(t, c.RegisterPool(nil), "no pool given")
	require.ErrorContains(t, (*Communicator)(nil).RegisterPool(p), "no communicator given")
	require.ErrorContains(t, (*Communicator)(nil).DeregisterPool(p), "no communicator given")
	was, err := memory.TakeSnapshot()
	require.NoError(t, err)
	defer func() { require.NoError(t, memory.SetAllocatorSettings(was.Settings.Conf)) }()
	require.NoError(t, memory.SetAllocatorSettings("expandable_segments:True"))
	pages := memory.NewPool(nil)
	x, err := makeIn(t, pages, s, 10)
	require.NoError(t, err)
	require.ErrorContains(t, c.RegisterPool(pages), "the pool has expandable segments")
	require.NoError(t, x.Close())
	require.NoError(t, pages.Close())
	require.ErrorIs(t, c.RegisterPool(pages), device.ErrClosed)
	pages = memory.NewPool(nil)
	require.NoError(t, c.RegisterPool(pages))
	x, err = makeIn(t, pages, s, 10)
	require.NoError(t, err)
	require.False(t, pages.Snapshot()[0].Expandable, "a pool that is known has segments that stay as they are")
	require.NoError(t, x.Close())
	require.NoError(t, pages.Close())
	c.version = 21800
	var old *device.UnsupportedError
	require.ErrorAs(t, c.RegisterPool(p), &old)
}
