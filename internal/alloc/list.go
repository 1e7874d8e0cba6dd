package alloc

import "slices"

// A list has free blocks in the order of their sizes and keys. It keeps them in
// chunks of limited length, so that a search goes over few lines of the
// processor's cache and a change moves few entries.
type list struct {
	chunks []chunk // none is empty, but for the only one
}

type chunk []entry

// An entry is a block with what it is ordered by, so that a search need not look
// at the block.
type entry struct {
	size uint64
	key  uint64
	b    *block
}

// chunkLen is how long a chunk may become before it is divided.
const chunkLen = 64

func (e *entry) before(size, key uint64) bool {
	return e.size < size || e.size == size && e.key < key
}

// chunk returns the place of the chunk in which an entry is or would be.
func (l *list) chunk(size, key uint64) int {
	lo, hi := 0, len(l.chunks)-1
	for lo < hi { // the first chunk whose last entry is not before it
		mid := (lo + hi) / 2
		if c := l.chunks[mid]; c[len(c)-1].before(size, key) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// place returns how many entries of the chunk are before it.
func (c chunk) place(size, key uint64) int {
	lo, hi := 0, len(c)
	for lo < hi {
		mid := (lo + hi) / 2
		if c[mid].before(size, key) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (l *list) empty() bool { return len(l.chunks) == 0 || len(l.chunks[0]) == 0 }

func (l *list) insert(b *block) {
	if l.chunks == nil {
		l.chunks = []chunk{make(chunk, 0, 4)}
	}
	i := l.chunk(b.size, b.key)
	c := l.chunks[i]
	if len(c) == chunkLen {
		rest := append(make(chunk, 0, chunkLen), c[chunkLen/2:]...)
		clear(c[chunkLen/2:])
		l.chunks[i] = c[:chunkLen/2]
		l.chunks = slices.Insert(l.chunks, i+1, rest)
		if rest[0].before(b.size, b.key) {
			i++
		}
		c = l.chunks[i]
	}
	l.chunks[i] = slices.Insert(c, c.place(b.size, b.key), entry{b.size, b.key, b})
}

func (l *list) remove(b *block) {
	i := l.chunk(b.size, b.key)
	c := l.chunks[i]
	at := c.place(b.size, b.key)
	l.chunks[i] = slices.Delete(c, at, at+1)
	if len(l.chunks[i]) == 0 && len(l.chunks) > 1 {
		l.chunks = slices.Delete(l.chunks, i, i+1)
	}
}

// least returns the first block of at least size bytes, or nil.
func (l *list) least(size uint64) *block {
	if l.empty() {
		return nil
	}
	c := l.chunks[l.chunk(size, 0)]
	if at := c.place(size, 0); at < len(c) {
		return c[at].b
	}
	return nil
}

func (l *list) first() *block { return l.chunks[0][0].b }
