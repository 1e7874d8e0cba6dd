package alloc

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/poll"
)

// Pages of slots come back when their segments are gone, and are zero again.
func TestSlotPagesComeBack(t *testing.T) {
	freePages := func() int {
		slabs.mu.Lock()
		defer slabs.mu.Unlock()
		return len(slabs.free)
	}
	const pages = 100
	segments := make([]*segment, pages)
	for i := range segments {
		segments[i] = &segment{}
		segments[i].slots = newSlotPage(segments[i])
		require.Len(t, segments[i].slots, slotPage)
		requireClear(t, segments[i].slots)
		for k := range segments[i].slots {
			segments[i].slots[k] = slot{size: 1, under: uint32(k)}
		}
	}
	before := freePages()
	runtime.KeepAlive(segments)
	segments = nil
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, poll.Until(ctx, func() (bool, error) {
		runtime.GC()
		return freePages() >= before+pages, nil
	}))
	for range pages {
		p := takeSlotPage()
		requireClear(t, p[:])
		giveSlotPage(p)
	}
}

func requireClear(t *testing.T, slots []slot) {
	t.Helper()
	require.Equal(t, -1, slices.IndexFunc(slots, func(x slot) bool { return x != slot{} }))
}
