package memory_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A use of a stream that another goroutine closes holds the stream or meets
// device.ErrClosed: none revives what is being destroyed, which would be destroyed
// twice and never be past what was freed behind it.
func TestUseWhileTheStreamCloses(t *testing.T) {
	type env struct {
		d      *device.Device
		s      *stream.Stream // which stays open
		x      memory.Slice[byte]
		pinned *memory.Pinned[byte]
	}
	engines := map[string]func(d *device.Device) error{
		"native":   func(*device.Device) error { return nil },
		"uncached": func(d *device.Device) error { return memory.EnableCaching(d, false) },
	}
	for name, use := range map[string]func(e *env, o *stream.Stream) error{
		"Alloc": func(e *env, o *stream.Stream) error {
			b, err := memory.Alloc(o, 1000)
			return errorsOf(err, b.Close())
		},
		"AllocRaw": func(e *env, o *stream.Stream) error {
			p, err := memory.AllocRaw(o, 1000)
			return errorsOf(err, memory.FreeRaw(e.d, p))
		},
		"RecordStream": func(e *env, o *stream.Stream) error {
			b, err := memory.Alloc(e.s, 1000)
			if err != nil {
				return err
			}
			return errorsOf(b.RecordStream(o), b.Close())
		},
		"RecordStreamRaw": func(e *env, o *stream.Stream) error {
			p, err := memory.AllocRaw(e.s, 1000)
			if err != nil {
				return err
			}
			return errorsOf(memory.RecordStreamRaw(p+500, o), memory.FreeRaw(e.d, p))
		},
		"CopyFromPinned": func(e *env, o *stream.Stream) error {
			return errorsOf(e.pinned.RecordStream(o), e.x.CopyFromPinned(o, e.pinned))
		},
	} {
		for engine, begin := range engines {
			t.Run(name+"/"+engine, func(t *testing.T) {
				e := env{d: fresh(t, "virtual")}
				require.NoError(t, begin(e.d))
				e.s = newStream(t, e.d)
				for range 15 {
					var err error
					e.x, err = memory.Make[byte](e.s, 100)
					require.NoError(t, err)
					e.pinned, err = memory.PinSlice(e.d, make([]byte, 100))
					require.NoError(t, err)
					o, err := stream.New(e.d, nil)
					require.NoError(t, err)
					require.NoError(t, o.WaitStream(e.s))
					errs := make([]error, 3)
					var group, started sync.WaitGroup
					for i := range errs {
						started.Add(1)
						group.Go(func() {
							errs[i] = use(&e, o)
							started.Done()
							for errs[i] == nil {
								runtime.Gosched() // on one processor the stream and Close would wait for a time slice again and again
								errs[i] = use(&e, o)
							}
						})
					}
					started.Wait()
					require.NoError(t, o.Close())
					group.Wait()
					for _, err := range errs {
						require.ErrorIs(t, err, device.ErrClosed)
						require.NotErrorIs(t, err, device.ErrorInvalidHandle)
					}
					require.NoError(t, e.pinned.Close())
					require.NoError(t, e.x.Close())
				}
				require.NoError(t, memory.EmptyCache(e.d))
				require.Zero(t, statsOf(t, e.d).ReservedBytes.All.Current, "nothing waits for a stream that is gone")
			})
		}
	}
}

// What has used a stream lets it go: the driver's stream does not outlive all that.
func TestStreamsAreLetGo(t *testing.T) {
	for name, b := range backends {
		if b.onCUDA {
			continue
		}
		t.Run(name, func(t *testing.T) {
			configure(t, b.conf)
			d := fresh(t, "virtual")
			if b.begin != nil {
				b.begin(t, d)
			}
			s, o := newStream(t, d), newStreamOf(t, d)
			x, err := memory.Make[byte](s, 1000)
			require.NoError(t, err)
			raw, err := memory.AllocRaw(s, 1000)
			require.NoError(t, err)
			pinned, err := memory.MakePinned[byte](d, 1000)
			require.NoError(t, err)
			shut, err := memory.MakePinned[byte](d, 1000)
			require.NoError(t, errors.Join(err, shut.Close()))
			own, err := memory.Make[byte](o, 1000)
			require.NoError(t, err)
			require.NoError(t, o.WaitStream(s))
			for range 2 {
				require.NoError(t, x.RecordStream(o))
				require.NoError(t, memory.RecordStreamRaw(raw, o))
				require.NoError(t, pinned.RecordStream(o))
				require.NoError(t, x.CopyFromPinned(o, pinned))
				require.ErrorIs(t, shut.RecordStream(o), device.ErrClosed)
				require.Error(t, memory.RecordStreamRaw(12345, o))
				_, err = memory.Alloc(o, 1<<50)
				require.ErrorIs(t, err, device.ErrorOutOfMemory)
				_, err = memory.AllocRaw(o, 1<<50)
				require.ErrorIs(t, err, device.ErrorOutOfMemory)
			}
			require.NoError(t, o.Close())
			require.True(t, gpu.StreamOf(o).Retain(), "it is in use")
			require.NoError(t, gpu.StreamOf(o).Release())
			require.NoError(t, errors.Join(x.Close(), memory.FreeRaw(d, raw), pinned.Close(), own.Close()))
			require.NoError(t, d.Sync(testgpu.Context(t)))
			require.NoError(t, memory.EmptyCache(d))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			require.NoError(t, poll.Until(ctx, func() (bool, error) {
				err := memory.EmptyHostCache(d) // which looks, and does not wait
				if !gpu.StreamOf(o).Retain() {
					return true, err
				}
				return false, errors.Join(err, gpu.StreamOf(o).Release())
			}), "nothing uses it")
		})
	}
}
