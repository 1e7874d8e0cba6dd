package memory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/mem"
)

// A Use is a part of a device's memory, in bytes.
type Use struct {
	Owner    string // what uses it, such as "buffers" or "NCCL, communicator 0, rank 1 of 2"
	Bytes    uint64
	Reserved bool // the caching allocator has reserved it, so function Reserved counts it
}

// Usage says what uses the memory of a device.
type Usage struct {
	Device string
	Total  uint64 // of the device
	Free   uint64 // for all processes
	Uses   []Use  // the sum of all Bytes is Total - Free, unless memory changed meanwhile
}

// The names of the uses that Ledger itself counts.
const (
	useBuffers = "buffers"
	usePools   = "buffers in pools"
	useGraphs  = "buffers of graphs"
	useCached  = "free memory that the caching allocator keeps"
	useOthers  = "everything else: contexts, modules, libraries that do not tell, other processes"
)

// Ledger returns what uses the memory of d. It counts the program's buffers, the memory that
// Chorus keeps for products and for its kernels, NCCL's memory of each communicator, the cache
// of the allocator, and the rest. The rest has NCCL's memory too if NCCL is older than 2.29.7, or
// while another goroutine calls NCCL for the communicator. Ledger waits for no work on the
// device. torch has no counterpart.
func Ledger(d *device.Device) (*Usage, error) {
	h, err := heapOf(d)
	if err != nil {
		return nil, fmt.Errorf("memory: ledger: %w", err)
	}
	u := &Usage{Device: d.String()}
	if u.Free, u.Total, err = d.MemoryInfo(); err != nil {
		return nil, fmt.Errorf("memory: ledger of %s: %w", d, err)
	}
	u.Uses = h.uses()
	known := uint64(0)
	for _, x := range u.Uses {
		known += x.Bytes
	}
	if used := u.Total - min(u.Free, u.Total); used > known {
		u.Uses = append(u.Uses, Use{Owner: useOthers, Bytes: used - known})
	}
	return u, nil
}

// uses returns what the process knows of the device's memory.
func (h *heap) uses() []Use {
	list := h.allocated()
	for _, x := range mem.Uses(h.dev) {
		if x.Inside {
			list[0].Bytes -= min(list[0].Bytes, x.Bytes)
		}
		if i := slices.IndexFunc(list, func(u Use) bool { return u.Owner == x.Owner }); i >= 0 {
			list[i].Bytes += x.Bytes
		} else {
			list = append(list, Use{x.Owner, x.Bytes, x.Inside})
		}
	}
	return slices.DeleteFunc(list, func(x Use) bool { return x.Bytes == 0 })
}

// allocated divides the reserved memory. Its first element has the buffers outside of pools.
func (h *heap) allocated() []Use {
	list := []Use{{Owner: useBuffers, Reserved: true}, {Owner: usePools, Reserved: true}, {Owner: useGraphs, Reserved: true}, {Owner: useCached, Reserved: true}}
	for _, s := range h.native.Segments() {
		to := &list[0]
		switch {
		case s.Graphs:
			to = &list[2]
		case s.Pool != h.native.Default().ID():
			to = &list[1]
		}
		used := uint64(0)
		for _, b := range s.Blocks {
			if b.Used || b.Pending {
				used += b.Size
			}
		}
		to.Bytes += used
		list[3].Bytes += s.Size - used
	}
	list[0].Bytes += h.lent()
	return list
}

// lent returns the bytes that Allocators without a cache have allocated for the device.
func (h *heap) lent() (bytes uint64) {
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	for _, e := range engines {
		e.mu.Lock()
		bytes += uint64(max(e.stats.AllocatedBytes.All.Current, 0))
		e.mu.Unlock()
	}
	return bytes
}

// String returns a table with a line for each use, the largest first.
func (u *Usage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s of %s are free\n", u.Device, formatSize(u.Free), formatSize(u.Total))
	for _, x := range bySize(u.Uses) {
		fmt.Fprintf(&b, "%12s  %s\n", formatSize(x.Bytes), x.Owner)
	}
	return b.String()
}

func bySize(list []Use) []Use {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Use) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return list
}
