package memory_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A meeting is an Allocator of which several goroutines are asking at the same time,
// and which says how much it has given out.
type meeting struct {
	memory.Allocator
	fails atomic.Bool
	asked chan bool // gets one for each that has come
	given chan bool // lets one go
}

func (m *meeting) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	m.asked <- true
	<-m.given
	if m.fails.Load() {
		return 0, device.ErrorOutOfMemory
	}
	return m.Allocator.Alloc(s, bytes)
}

// Goroutines that allocate at the same time do not go beyond the fraction together,
// and what the allocator could not give is there for others.
func TestFractionOfManyGoroutines(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		_, total, err := d.MemoryInfo()
		require.NoError(t, err)
		m := &meeting{Allocator: memory.Driver, asked: make(chan bool), given: make(chan bool)}
		require.NoError(t, memory.ChangeAllocator(d, m))
		require.NoError(t, memory.SetFraction(d, float64(10*mib+1000)/float64(total)))
		var group sync.WaitGroup
		var buffers [3]*memory.Buffer
		var errs [3]error
		begin := func(i, bytes int) {
			group.Go(func() { buffers[i], errs[i] = memory.Alloc(s, bytes) })
			<-m.asked
		}
		begin(0, 6*mib)
		begin(1, 4*mib)
		_, err = memory.Alloc(s, mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "what others are asking for is taken")
		m.fails.Store(true)
		m.given <- true
		m.given <- true
		group.Wait()
		for _, err := range errs[:2] {
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
		}
		m.fails.Store(false)
		begin(2, 10*mib)
		m.given <- true
		group.Wait()
		require.NoError(t, errs[2], "nothing was given, so all may be asked for")
		_, err = memory.Alloc(s, mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "now it is")
		require.NoError(t, buffers[2].Close())
		require.EqualValues(t, 4, statsOf(t, d).OOMs)
		require.NoError(t, memory.SetFraction(d, 1))
	})
}
