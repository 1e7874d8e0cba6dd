package alloc

// A list has free blocks in the order of their sizes and keys. It keeps them in
// chunks of limited length, so that a search goes over few lines of the
// processor's cache and a change moves few entries. A list of the zero value is
// empty.
type list struct {
	chunks []chunk // none is empty, but for the only one
}

type chunk []entry

// An entry stands for a block.
type entry struct{ size, key uint64 }

// chunkLen is how long a chunk may become before it is divided.
const chunkLen = 64

func (e entry) before(o entry) bool { return e.size < o.size || e.size == o.size && e.key < o.key }

// chunk returns the place of the chunk in which an entry is or would be: the first
// whose last entry is not before it, or the last one.
func (l *list) chunk(e entry) int {
	lo, hi := 0, len(l.chunks)-1
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c := l.chunks[mid]; c[len(c)-1].before(e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// place returns how many entries of the chunk are before e.
func (c chunk) place(e entry) int {
	lo, hi := 0, len(c)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c[mid].before(e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (l *list) empty() bool { return len(l.chunks) == 0 || len(l.chunks[0]) == 0 }

func (l *list) insert(e entry) {
	if l.chunks == nil {
		l.chunks = []chunk{make(chunk, 0, 4)}
	}
	i := l.chunk(e)
	if len(l.chunks[i]) == chunkLen {
		l.divide(i)
		i = l.chunk(e)
	}
	c := append(l.chunks[i], e)
	at := c[:len(c)-1].place(e)
	copy(c[at+1:], c[at:])
	c[at] = e
	l.chunks[i] = c
}

// divide makes two chunks of a full one.
func (l *list) divide(i int) {
	c := l.chunks[i]
	rest := append(make(chunk, 0, chunkLen), c[chunkLen/2:]...)
	l.chunks = append(l.chunks, nil)
	copy(l.chunks[i+1:], l.chunks[i:])
	l.chunks[i], l.chunks[i+1] = c[:chunkLen/2], rest
}

func (l *list) remove(e entry) {
	i := l.chunk(e)
	c := l.chunks[i]
	at := c.place(e)
	copy(c[at:], c[at+1:])
	l.chunks[i] = c[:len(c)-1]
	if len(c) == 1 && len(l.chunks) > 1 {
		copy(l.chunks[i:], l.chunks[i+1:])
		l.chunks[len(l.chunks)-1] = nil
		l.chunks = l.chunks[:len(l.chunks)-1]
	}
}

// least returns the first entry of at least size bytes.
func (l *list) least(size uint64) (e entry, ok bool) {
	if l.empty() {
		return entry{}, false
	}
	c := l.chunks[l.chunk(entry{size: size})]
	at := c.place(entry{size: size})
	if at == len(c) {
		return entry{}, false
	}
	return c[at], true
}

// after returns the entry behind e.
func (l *list) after(e entry) (next entry, ok bool) {
	i := l.chunk(e)
	c := l.chunks[i]
	if at := c.place(e) + 1; at < len(c) {
		return c[at], true
	}
	if i+1 < len(l.chunks) {
		return l.chunks[i+1][0], true
	}
	return entry{}, false
}

func (l *list) first() entry { return l.chunks[0][0] }
