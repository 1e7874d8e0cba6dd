package race

import "slices"

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
