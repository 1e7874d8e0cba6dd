package alloc

import "slices"

// A list has free blocks sorted by size and key. It keeps them in chunks of limited
// length, so that a search touches few cache lines and a change moves few entries. The
// zero value is an empty list.
type list struct {
	only   chunk   // the only chunk, while chunks is nil
	chunks []chunk // all chunks; none is empty
}

type chunk []entry

// An entry identifies a block.
type entry struct{ size, key uint64 }

// chunkLen is the maximum length of a chunk.
const chunkLen = 64

func (e *entry) before(o *entry) bool { return e.size < o.size || e.size == o.size && e.key < o.key }

// chunk returns the chunk that contains e or would contain it, and its index: the first
// chunk whose last entry is not before e, or the last chunk.
func (l *list) chunk(e entry) (c *chunk, i int) {
	if l.chunks == nil {
		return &l.only, 0
	}
	lo, hi := 0, len(l.chunks)-1
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c := l.chunks[mid]; c[len(c)-1].before(&e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return &l.chunks[lo], lo
}

// place returns how many entries of the chunk are before e. The common cases are tested
// first: the first entry, the last entry, and an entry before or after all others.
func (c chunk) place(e entry) int {
	hi := len(c)
	if hi == 0 || !c[0].before(&e) {
		return 0
	}
	if last := &c[hi-1]; last.before(&e) {
		return hi
	} else if *last == e {
		return hi - 1
	}
	lo := 1
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c[mid].before(&e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (l *list) empty() bool { return len(l.only) == 0 && l.chunks == nil }

func (l *list) insert(e entry) {
	c, i := l.chunk(e)
	if len(*c) == chunkLen {
		l.divide(i)
		c, _ = l.chunk(e)
	}
	at := c.place(e)
	*c = append(*c, e)
	if at+1 < len(*c) {
		copy((*c)[at+1:], (*c)[at:])
		(*c)[at] = e
	}
}

// divide splits a full chunk into two.
func (l *list) divide(i int) {
	if l.chunks == nil {
		l.chunks, l.only = []chunk{l.only}, nil
	}
	c := l.chunks[i]
	rest := append(make(chunk, 0, chunkLen), c[chunkLen/2:]...)
	l.chunks = slices.Insert(l.chunks, i+1, rest)
	l.chunks[i] = c[:chunkLen/2]
}

func (l *list) remove(e entry) {
	c, i := l.chunk(e)
	at := c.place(e)
	if at+1 < len(*c) {
		copy((*c)[at:], (*c)[at+1:])
	}
	*c = (*c)[:len(*c)-1]
	if len(*c) > 0 || l.chunks == nil {
		return
	}
	if l.chunks = slices.Delete(l.chunks, i, i+1); len(l.chunks) == 1 {
		l.only, l.chunks = l.chunks[0], nil
	}
}

// replace replaces an entry by another one if the order permits it.
func (l *list) replace(old, e entry) bool {
	c, _ := l.chunk(old)
	at := c.place(old)
	if at > 0 && !(*c)[at-1].before(&e) || at+1 < len(*c) && !e.before(&(*c)[at+1]) {
		return false
	}
	if l.chunks != nil && (at == 0 || at+1 == len(*c)) {
		return false // the neighboring chunks would have to be checked too
	}
	(*c)[at] = e
	return true
}

// least returns the first entry of at least size bytes.
func (l *list) least(size uint64) (e entry, ok bool) {
	c, _ := l.chunk(entry{size: size})
	at := c.place(entry{size: size})
	if at == len(*c) {
		return entry{}, false
	}
	return (*c)[at], true
}

// after returns the entry after e.
func (l *list) after(e entry) (next entry, ok bool) {
	c, i := l.chunk(e)
	if at := c.place(e) + 1; at < len(*c) {
		return (*c)[at], true
	}
	if i+1 < len(l.chunks) {
		return l.chunks[i+1][0], true
	}
	return entry{}, false
}

func (l *list) first() entry {
	if l.chunks != nil {
		return l.chunks[0][0]
	}
	return l.only[0]
}

func (l *list) last() entry {
	c := l.only
	if l.chunks != nil {
		c = l.chunks[len(l.chunks)-1]
	}
	return c[len(c)-1]
}

// all returns the entries in order.
func (l *list) all() []entry { return slices.Concat(append([]chunk{l.only}, l.chunks...)...) }
