package memory

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// ErrView is the error of Close on a slice that Make did not return.
var ErrView = errors.New("only the slice that Make returned can be closed")

// An OutOfMemoryError reports that a device could not allocate memory, even after all
// cached memory was returned to the driver. It matches device.ErrorOutOfMemory
// (torch.cuda.OutOfMemoryError). Sizes are in bytes.
type OutOfMemoryError struct {
	Device    string // such as "cuda:3"
	Requested uint64 // the size that the caller requested
	Wanted    uint64 // the size requested from the driver; 0 if no device has as much memory
	Free      uint64 // free memory of the device
	Total     uint64 // total memory of the device
	Allocated uint64 // memory that the program has allocated
	Private   uint64 // the part of Allocated that is in pools, such as the pools of graphs
	PoolFree  uint64 // memory that pools have reserved and not allocated
	Reserved  uint64 // memory that Chorus has reserved from the driver
	Largest   uint64 // the largest free block of the stream
	Fraction  float64
	Uses      []Use // of the device's memory, as Ledger returns them
	Err       error // the driver's error
}

func (e *OutOfMemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory: out of memory on %s: tried to allocate %s", e.Device, formatSize(e.Requested))
	if e.Wanted == 0 && e.Requested >= absurd {
		fmt.Fprintf(&b, ", more than any device has: check the size")
		return b.String()
	}
	fmt.Fprintf(&b, "; %s of %s are free", formatSize(e.Free), formatSize(e.Total))
	if e.Reserved == 0 && e.Err != device.ErrorOutOfMemory {
		fmt.Fprintf(&b, ": %v", e.Err)
		return b.String()
	}
	if e.Fraction < 1 {
		fmt.Fprintf(&b, "; the process may use %s (%g of all)", formatSize(uint64(e.Fraction*float64(e.Total))), e.Fraction)
	}
	fmt.Fprintf(&b, "; %s are allocated", formatSize(e.Allocated))
	if e.Private > 0 {
		fmt.Fprintf(&b, ", %s of them in pools (graphs have some)", formatSize(e.Private))
	}
	fmt.Fprintf(&b, "; %s are reserved but not allocated, the largest block %s", formatSize(e.Reserved-min(e.Reserved, e.Allocated)), formatSize(e.Largest))
	switch o := options.Load(); {
	case e.Reserved <= e.Allocated || e.Reserved-e.Allocated < e.Requested:
	case e.Reserved-e.Allocated-min(e.PoolFree, e.Reserved-e.Allocated) < e.Requested:
		fmt.Fprintf(&b, ": %s of the free memory are in pools: close a pool, or allocate from it", formatSize(e.PoolFree))
	case o != nil && o.Expandable:
		b.WriteString(": the free memory is in fragments")
	default:
		b.WriteString(": the free memory is in fragments: set CHORUS_ALLOC_CONF=expandable_segments:True")
	}
	e.writeUses(&b)
	return b.String()
}

// writeUses names other uses of at least a hundredth of the device.
func (e *OutOfMemoryError) writeUses(b *strings.Builder) {
	before := "; memory outside of the allocator: "
	for _, x := range bySize(e.Uses) {
		if x.Bytes < e.Total/100 || x.Reserved {
			continue
		}
		fmt.Fprintf(b, "%s%s for %s", before, formatSize(x.Bytes), x.Owner)
		before = ", "
	}
}

// Unwrap returns the driver's error.
func (e *OutOfMemoryError) Unwrap() error { return e.Err }

// formatSize writes a number of bytes as torch does.
func formatSize(n uint64) string {
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if limit := uint64(1) << (30 - 10*i); n > limit {
			return fmt.Sprintf("%.2f %s", float64(n)/float64(limit), unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// outOfMemory makes the error of an allocation outside of the caching allocator.
func outOfMemory(d *device.Device, bytes uintptr, cause error) error {
	free, total, _ := d.MemoryInfo() // if this fails too, the error reports zeros
	return &OutOfMemoryError{Device: d.String(), Requested: uint64(bytes), Wanted: uint64(bytes), Free: free, Total: total, Fraction: 1, Err: cause}
}

// because adds to err which object was closed, if that is the cause.
func (h *heap) because(err error) error {
	switch {
	case !errors.Is(err, alloc.ErrEnded) && !errors.Is(err, alloc.ErrClosed):
		return err
	case h.closed.Load():
		return fmt.Errorf("its System was closed: %w", device.ErrClosed)
	}
	return fmt.Errorf("%w: %w", err, device.ErrClosed)
}

// explain turns an error of an allocation into one of this package.
func (h *heap) explain(bytes int, err error) error {
	if !errors.Is(err, alloc.ErrNoMemory) {
		return fmt.Errorf("memory: allocate %d bytes on %s: %w", bytes, h.dev, h.because(err))
	}
	e := outOfMemory(h.dev, uintptr(bytes), device.ErrorOutOfMemory).(*OutOfMemoryError)
	if a, ok := errors.AsType[*alloc.NoMemoryError](err); ok {
		e.Wanted, e.Allocated, e.Private, e.PoolFree, e.Reserved, e.Largest = a.Wanted, a.Allocated, a.Private, a.PoolFree, a.Reserved, a.Largest
		e.Fraction = h.native.Fraction()
	}
	if u, err := Ledger(h.dev); err == nil {
		e.Uses = u.Uses
	}
	return e
}

// A PointerError reports an address that is not allocated: it was freed before, or
// Chorus never allocated it.
type PointerError struct {
	Op        string
	Device    string
	Address   uint64
	Block     uint64 // start of the block that the address lies in, or 0
	Size      uint64 // of that block, in bytes
	Allocated Stack  // the last allocation, if RecordHistory has recorded it
	Freed     Stack  // the last free
	Err       error
}

func (e *PointerError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory: %s on %s: %v", e.Op, e.Device, e.Err)
	for _, s := range []struct {
		what  string
		stack Stack
	}{{"allocated", e.Allocated}, {"freed", e.Freed}} {
		if len(s.stack) > 0 {
			fmt.Fprintf(&b, "; it was %s at %s", s.what, s.stack)
		}
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *PointerError) Unwrap() error { return e.Err }

// pointer turns an error about an address into one of this package.
func (h *heap) pointer(op string, ptr uint64, err error) error {
	a, ok := errors.AsType[*alloc.PointerError](err)
	if !ok {
		return fmt.Errorf("memory: %s %#x on %s: %w", op, ptr, h.dev, h.because(err))
	}
	return &PointerError{Op: op, Device: h.dev.String(), Address: ptr, Block: a.Within, Size: a.Size,
		Allocated: stackOf(a.Stack), Freed: stackOf(a.Freed), Err: err}
}
