package strided

// turnBytes is the minimum length of the parts into which pieces of one launch are
// divided.
var turnBytes = 1 << 20

// turns returns the number of parts into which each piece is divided. The blocks of a
// kernel start in element order: if one piece stays on the device and others come from
// other devices, memory and links would otherwise wait for each other.
func (b *pieces) turns() int {
	each := len(b.list) * turnBytes
	return max(1, min(maxPieces/len(b.list), b.bytes/each))
}

// part returns part i of a piece with elements of 1<<width bytes. The part is empty if
// there are fewer rows, or elements of a contiguous piece, than parts.
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

// fill makes a table of pieces, divided into alternating parts.
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
