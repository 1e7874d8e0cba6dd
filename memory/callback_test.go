package memory_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A callback frees memory and allocates what is cached while another goroutine waits
// for it to empty the cache; what needs the driver is refused there.
func TestCallbackUsesMemory(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s, o, gone := newStream(t, d), newStream(t, d), newStreamOf(t, d)
				p := memory.NewPool(nil)
				mine, theirs, pooled := makeBytes(t, s, 1000), makeBytes(t, s, 30*mib), makeIn(t, p, s, 1000)
				last := makeBytes(t, gone, 1000)
				require.NoError(t, errors.Join(gone.Close(), p.Close()))
				require.NoError(t, theirs.RecordStream(o))
				keep := makeBytes(t, s, 1000) // its segment stays
				var empties atomic.Bool
				started := make(chan struct{})
				var errs []error
				require.NoError(t, o.Callback(func() {
					close(started)
					for n := 0; n < 1000; {
						x, err := memory.Make[byte](s, 1000)
						errs = append(errs, err, x.Close())
						if empties.Load() {
							n++
						}
					}
					errs = append(errs, mine.Close(), last.Close(), pooled.Close())
					for _, refused := range []error{
						memory.EmptyCache(d),
						func() error { _, err := memory.Alloc(s, 100*mib); return err }(),
						func() error { _, err := memory.Alloc(o, 1000); return err }(),
					} {
						if !errors.Is(refused, device.ErrorNotPermitted) {
							errs = append(errs, errors.New("not refused"), refused)
						}
					}
				}))
				x := makeBytes(t, s, 1000)
				require.NoError(t, x.Close())
				<-started
				require.NoError(t, theirs.Close())
				empties.Store(true)
				require.NoError(t, memory.EmptyCache(d))
				require.NoError(t, o.Sync(testgpu.Context(t)))
				require.NoError(t, errors.Join(errs...))
				require.NoError(t, keep.Close())
				require.NoError(t, memory.EmptyCache(d))
				require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
				require.False(t, gpu.InCallback())
			})
		})
	}
}

func makeBytes(t testing.TB, s *stream.Stream, n int) memory.Slice[byte] {
	t.Helper()
	x, err := memory.Make[byte](s, n)
	require.NoError(t, err)
	return x
}
