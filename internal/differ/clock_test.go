package differ

// A clock has, for each stream by its slot, the last operation that is known to
// have come before. Slot 0 is the host.
type clock map[int]int

func (c clock) join(o clock) {
	for slot, at := range o {
		c[slot] = max(c[slot], at)
	}
}

func (c clock) clone() clock {
	d := make(clock, len(c))
	d.join(c)
	return d
}

// A use is an operation's use of some bytes of memory.
type use struct {
	slot, at int
	lo, hi   int
	write    bool
}

// An access is what an operation is about to use.
type access struct {
	m      *mMem
	lo, hi int
	write  bool
	kept   bool // a graph has the memory, open or not
}

func reads(r *mRef) access  { return access{m: r.m, lo: r.lo, hi: r.hi} }
func writes(r *mRef) access { return access{m: r.m, lo: r.lo, hi: r.hi, write: true} }

// gone reports whether the memory was freed.
func (a access) gone() bool { return a.m.closed && !a.m.pinned && !a.kept || a.m.doubt }

func (a access) conflicts(b access) bool {
	return a.m == b.m && (a.write || b.write) && a.lo < b.hi && b.lo < a.hi
}

// unordered returns the slot of an earlier use that conflicts with the access and
// is not known to have come before, or -1.
func (a access) unordered(seen clock, slot int) int {
	for _, u := range a.m.uses {
		if (a.write || u.write) && a.lo < u.hi && u.lo < a.hi && u.slot != slot && seen[u.slot] < u.at {
			return u.slot
		}
	}
	return -1
}

// note adds the access to the history of its memory, and drops earlier uses that it
// covers.
func (a access) note(seen clock, slot, at int) {
	kept := a.m.uses[:0]
	for _, u := range a.m.uses {
		before := u.slot == slot || seen[u.slot] >= u.at
		covered := a.lo <= u.lo && u.hi <= a.hi && (a.write || !u.write)
		if !(before && covered) {
			kept = append(kept, u)
		}
	}
	a.m.uses = append(kept, use{slot, at, a.lo, a.hi, a.write})
}
