package virtual

import "slices"

// Each stream has a slot, and counts its operations in epochs as they run.
//
// A clock has, for each slot, the last epoch that is known to have come before.
// Clocks are shared and never changed; joining makes a new one when there is
// something to add.
type clock []uint64

func (c clock) at(slot int) uint64 {
	if slot < len(c) {
		return c[slot]
	}
	return 0
}

func (c clock) join(d clock) clock {
	var sum clock
	for slot, epoch := range d {
		if epoch <= c.at(slot) {
			continue
		}
		if sum == nil {
			sum = slices.Concat(c, make(clock, max(0, len(d)-len(c))))
		}
		sum[slot] = epoch
	}
	if sum == nil {
		return c
	}
	return sum
}

// A stamp is a point in the life of one stream.
type stamp struct {
	seen  clock // of the other streams
	slot  int
	epoch uint64
}

func (c clock) joinStamp(s stamp) clock {
	c = c.join(s.seen)
	if c.at(s.slot) >= s.epoch {
		return c
	}
	sum := slices.Concat(c, make(clock, max(0, s.slot+1-len(c))))
	sum[s.slot] = s.epoch
	return sum
}

// after reports whether the point s comes after the operation with the epoch on
// the slot, or is part of it.
func (s *stamp) after(slot int, epoch uint64) bool {
	return slot == s.slot || s.seen.at(slot) >= epoch
}

// slots gives streams their slots. A slot is used again after its stream is
// destroyed and drained; its epochs go on, so an order that one of its streams
// had may be assumed for the next: a race can be missed, none is made up.
type slots struct {
	last []uint64 // the last epoch of each slot
	free []int
}

func (t *slots) take() stamp {
	if n := len(t.free); n > 0 {
		slot := t.free[n-1]
		t.free = t.free[:n-1]
		return stamp{slot: slot, epoch: t.last[slot]}
	}
	t.last = append(t.last, 0)
	return stamp{slot: len(t.last) - 1}
}

func (t *slots) put(s stamp) {
	t.last[s.slot] = s.epoch
	t.free = append(t.free, s.slot)
}
