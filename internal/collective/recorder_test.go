package collective

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

func TestSizeClass(t *testing.T) {
	for bytes, want := range map[uint64]string{
		0: "le_1KiB", 1 << 10: "le_1KiB", 1<<10 + 1: "le_32KiB", 32 << 10: "le_32KiB", 32<<10 + 1: "le_1MiB", 1 << 20: "le_1MiB",
		1<<20 + 1: "le_32MiB", 32 << 20: "le_32MiB", 32<<20 + 1: "le_1GiB", 1 << 30: "le_1GiB", 1<<30 + 1: "gt_1GiB", 1 << 62: "gt_1GiB",
	} {
		require.Equal(t, want, SizeNames[sizeClass(bytes)], bytes)
	}
}

// TestTotals counts operations, of which one is refused.
func TestTotals(t *testing.T) {
	r := NewRecorder(4)
	gather := &Call{Request: Request{Kind: AllGather, DType: memory.Float32, Service: 1}, In: 256, Out: 1024}
	r.totals.add(gather)
	r.totals.add(gather)
	r.totals.remove(&Entry{Request: gather.Request, in: gather.In, out: gather.Out})
	r.totals.add(&Call{Request: Request{Kind: Send, DType: memory.Uint8, Service: 200}, In: 1})
	type total struct {
		kind  Kind
		by    Service
		size  string
		total Total
	}
	var list []total
	r.Totals(func(k Kind, s Service, size int, x Total) { list = append(list, total{k, s, SizeNames[size], x}) })
	require.Equal(t, []total{
		{AllGather, 1, "le_32KiB", Total{1, 4096}},
		{Send, numServices - 1, "le_1KiB", Total{1, 1}},
	}, list)
}
