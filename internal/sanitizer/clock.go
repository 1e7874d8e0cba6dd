package sanitizer

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/handle"
)

// A Clock holds, for each slot, the last epoch that is known to precede. Each stream has a
// slot, and numbers its operations with epochs as they run. Clocks are immutable and
// shared; Join creates a new clock if necessary.
type Clock []uint64

// At returns the epoch of a slot.
func (c Clock) At(slot int) uint64 {
	if slot < len(c) {
		return c[slot]
	}
	return 0
}

// Join returns the clock of everything that precedes in c or in d.
func (c Clock) Join(d Clock) Clock {
	var sum Clock
	for slot, epoch := range d {
		if epoch <= c.At(slot) {
			continue
		}
		if sum == nil {
			sum = slices.Concat(c, make(Clock, max(0, len(d)-len(c))))
		}
		sum[slot] = epoch
	}
	if sum == nil {
		return c
	}
	return sum
}

// A Stamp is a point in time on one stream.
type Stamp struct {
	Seen  Clock // clock of the other streams
	Slot  int
	Epoch uint64
}

// JoinStamp is Join for a point in time.
func (c Clock) JoinStamp(s Stamp) Clock {
	c = c.Join(s.Seen)
	if c.At(s.Slot) >= s.Epoch {
		return c
	}
	sum := slices.Concat(c, make(Clock, max(0, s.Slot+1-len(c))))
	sum[s.Slot] = s.Epoch
	return sum
}

// Covers reports whether JoinStamp would not change c. The stream's own slot does not decide it: the slot may be another
// stream's by now, whose epochs follow those of the first one, and the stamp has also seen the slots of others.
func (c Clock) Covers(s Stamp) bool {
	for slot, epoch := range s.Seen {
		if epoch > c.At(slot) {
			return false
		}
	}
	return c.At(s.Slot) >= s.Epoch
}

// after reports whether s follows, or is part of, the operation with the epoch on
// the slot.
func (s *Stamp) after(slot int, epoch uint64) bool {
	return slot == s.Slot || s.Seen.At(slot) >= epoch
}

// Slots assigns slots to streams. A slot is reused after its stream is destroyed
// and drained, and its epochs continue. Therefore an order with the old stream
// may be attributed to the new one: a race can be missed, but never reported
// falsely.
type Slots struct {
	last []uint64 // the last epoch of each slot
	free []int
}

// Made returns the number of slots, assigned or not.
func (t *Slots) Made() int { return len(t.last) }

// InUse returns the number of slots that are assigned.
func (t *Slots) InUse() int { return len(t.last) - len(t.free) }

// Take assigns a slot.
func (t *Slots) Take() Stamp {
	if n := len(t.free); n > 0 {
		slot := t.free[n-1]
		t.free = t.free[:n-1]
		return Stamp{Slot: slot, Epoch: t.last[slot]}
	}
	t.last = append(t.last, 0)
	return Stamp{Slot: len(t.last) - 1}
}

// Put releases the slot of a stream whose last point in time is s.
func (t *Slots) Put(s Stamp) {
	t.last[s.Slot] = s.Epoch
	t.free = append(t.free, s.Slot)
}

// A Conflict is two uses of the same bytes without an order. At least one use writes.
type Conflict struct {
	By     Access // the later call
	Other  Access
	Write  bool   // By writes
	Lo, Hi uint64 // the bytes of the block that By uses
	Block  fmt.Stringer
}

// String describes both uses and the cure.
func (c *Conflict) String() string {
	cure := "the two streams are not ordered: record an event after the first use and make the other stream wait for it"
	if c.By.Stream == 0 && c.Other.Stream == 0 {
		cure = "the default streams of two devices" + strings.TrimPrefix(cure, "the two streams")
	}
	if c.By.Stream == Host || c.Other.Stream == Host {
		cure = "the host and the stream are not ordered: let the host wait for the stream first"
	}
	return fmt.Sprintf("race: %s %s bytes %d to %d of %v, which %v also uses, and %s", c.By, Verb(c.Write), c.Lo, c.Hi, c.Block, c.Other, cure)
}

// Verb returns "reads" or "writes".
func Verb(write bool) string {
	if write {
		return "writes"
	}
	return "reads"
}

// A Place is the call stack of the call that enqueued an operation. It is nil if it is
// unknown. It is resolved only for a report.
type Place struct {
	pcs []uintptr
	n   int
}

// Here returns the place of the caller.
func Here() *Place {
	p := new(Place)
	p.n = runtime.Callers(2, p.room())
	return p
}

// Mark stores the caller's place in p, without allocating.
func (p *Place) Mark() { p.n = runtime.Callers(2, p.room()) }

func (p *Place) room() []uintptr {
	if p.pcs == nil {
		p.pcs = make([]uintptr, 48)
	}
	return p.pcs
}

// String returns the file and the line of the program that called Chorus. If no such function
// is on the stack, because Chorus called the driver on a goroutine, it is the outermost
// function of Chorus.
func (p *Place) String() string {
	if p == nil {
		return ""
	}
	place := ""
	frames := runtime.CallersFrames(p.pcs[:p.n])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if f.File == "" || strings.HasPrefix(f.Function, "runtime.") {
			continue
		}
		place = fmt.Sprintf("%s:%d", f.File, f.Line)
		if !ofLibrary(f) {
			break
		}
	}
	return place
}

// ofLibrary reports whether a function belongs to Chorus's packages, without its programs,
// examples and tests, or to the standard library, which calls functions for others.
func ofLibrary(f runtime.Frame) bool {
	first, _, _ := strings.Cut(f.Function, "/")
	return strings.HasPrefix(first, "sync.") || strings.HasPrefix(first, "slices.") || handle.OfLibrary(f)
}
