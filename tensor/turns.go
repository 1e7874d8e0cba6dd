package tensor

// turnBytes is how long the parts are at least by which pieces of one launch take turns.
var turnBytes = 1 << 20

// turns returns in how many parts each of the pieces is to be copied. The blocks of a
// kernel begin in the order of the elements: where a piece stays on the device and
// others come from elsewhere, memory and links would wait for each other.
func (b *pieces) turns() int {
	each := len(b.list) * turnBytes
	return max(1, min(maxPieces/len(b.list), b.bytes/each))
}

// part returns one of some parts of a piece of elements that are 1<<width bytes, which is
// empty where there are fewer rows, or elements of one run.
func (p piece) part(i, of, width int) piece {
	if p.rows > 1 {
		lo, hi := p.rows*i/of, p.rows*(i+1)/of
		p.to, p.from, p.rows = p.to+uint64(lo*p.toStep), p.from+uint64(lo*p.fromStep), hi-lo
		return p
	}
	n := p.row >> width
	lo, hi := n*i/of<<width, n*(i+1)/of<<width
	p.to, p.from, p.row = p.to+uint64(lo), p.from+uint64(lo), hi-lo
	return p
}

// fill makes a table of pieces, whose parts take turns.
func (t *pieceTable) fill(b *pieces) {
	t.n, t.count = 0, 0
	for turn, turns := 0, b.turns(); turn < turns; turn++ {
		for _, p := range b.list {
			if p = p.part(turn, turns, b.width); p.bytes() > 0 {
				t.add(p, b.width)
			}
		}
	}
}

func (t *pieceTable) add(p piece, width int) {
	i := t.count
	t.n += uint32(p.bytes() >> width)
	t.count++
	t.to[i], t.from[i], t.end[i] = p.to, p.from, t.n
	t.row[i], t.toStep[i], t.fromStep[i] = uint32(p.row>>width), uint32(p.toStep>>width), uint32(p.fromStep>>width)
}
