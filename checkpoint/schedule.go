package checkpoint

import (
	"slices"
)

// A schedule says how the bytes of a checkpoint come to the ranks that need them, or, for
// saving, go back. One rank moves each byte of the files; the group brings the byte to the
// other ranks that need it. All ranks compute the same schedule.
//
// Bytes that one rank needs unchanged go straight to that rank. All other bytes go in rounds.
// In a round every rank reads about as much as the others, some of it into a staging buffer,
// copies elements out of that buffer to convert or cut them, and sends. Small tensors that
// not all ranks need whole would be many small reads and sends. Therefore one rank reads a
// batch of them, and each rank takes its parts out of a copy of the batch.
type schedule struct {
	direct []reads // by rank
	rounds []*round
}

type reads []read

// A read is a run of bytes of a file and its place in the memory of a rank.
type read struct {
	file   int
	off    int64
	size   int
	staged bool // at is in the staging buffer, not in the slab
	at     int
}

type round struct {
	ranks []work // by rank
	sends []send
}

// work is the part of one rank in a round.
type work struct {
	reads  reads
	copies []copying
	parts  []copying // out of batches, after the sends
	staged int       // bytes of the staging buffer
}

// A copying takes a box of a tensor out of the staging buffer: from rows of the cut's width,
// the indices of one rank.
type copying struct {
	of     *placed
	rows   int // of the flat cut's outer dimension
	width  int // of the rows in the staging buffer
	from   Range
	staged int  // the beginning of the rows
	packed bool // at is in the staging buffer too, because the box is sent from there
	at     int
}

// A send is a run of bytes that goes from one rank's memory to another's.
type send struct {
	from, to     int
	packed       bool // fromAt is in the staging buffer, not in the slab
	batch        bool // and toAt, too
	fromAt, toAt int
	bytes        int
}

// A scheduler computes the schedule of tensors, sorted by address.
type scheduler struct {
	ranks  int
	budget int // bytes that a rank moves in a round
	out    schedule
	load   []int // by rank: bytes of the open round
	open   *round
	area   region
	small  batch
}

// newSchedule returns the schedule of tensors that lay has placed. Only loads use batches: in a
// save, each rank writes its own parts.
func newSchedule(tensors []*placed, ranks, budget int, loads bool) *schedule {
	s := &scheduler{ranks: ranks, budget: budget, out: schedule{direct: make([]reads, ranks)}}
	for _, everywhere := range []bool{true, false} {
		for _, t := range tensors {
			switch {
			case t.cut.everywhere() != everywhere || loads && t.scattered != nil: // the host reads them
			case loads && ranks > 1 && !everywhere && t.fileBytes() <= smallTensor:
				s.addSmall(t)
			default:
				s.add(t)
			}
		}
	}
	s.flush()
	s.flushBatch()
	s.close()
	return &s.out
}

func (s *scheduler) add(t *placed) {
	if !t.contiguous() {
		s.flush()
		s.addRows(t)
		return
	}
	bounds := []int{}
	for _, g := range t.flat.ranges {
		if g.Len > 0 {
			bounds = append(bounds, g.Start, g.Start+g.Len)
		}
	}
	slices.Sort(bounds)
	bounds = slices.Compact(bounds)
	for i := 1; i < len(bounds); i++ {
		s.addRun(segment{of: t, lo: bounds[i-1], hi: bounds[i]})
	}
}

// needers returns the ranks that need the elements of a segment.
func (r *segment) needers() []int {
	var who []int
	for rank, g := range r.of.flat.ranges {
		if g.Len > 0 && g.Start <= r.lo && r.hi <= g.Start+g.Len {
			who = append(who, rank)
		}
	}
	return who
}

func (s *scheduler) addRun(r segment) {
	who := r.needers()
	switch {
	case len(who) == 0:
	case len(who) == 1 && !r.of.casts():
		s.out.direct[who[0]] = append(s.out.direct[who[0]], r.readTo(who[0], r.lo, r.hi))
	case !s.area.joins(&r, who):
		s.flush()
		s.area = region{who: who}
		fallthrough
	default:
		s.area.runs = append(s.area.runs, r)
	}
}

// flush moves the runs of the region.
func (s *scheduler) flush() {
	a := s.area
	if s.area = (region{}); len(a.runs) == 0 {
		return
	}
	who := a.who
	begin, end := a.runs[0].at(who[0], a.runs[0].lo), a.end(who[0])
	for at := begin; at < end; {
		room := s.room(who)
		share := roundUp(min((end-at+len(who)-1)/len(who), room), slotAlign)
		for _, reader := range who {
			// Parts end at the alignment of tensors, so that no element is cut.
			next := min(at/slotAlign*slotAlign+share, end)
			if at < next {
				s.addPart(&a, reader, at, next)
			}
			at = max(at, next)
		}
	}
}

// room returns how much each of the ranks may still move in the open round, and
// opens another round if that is nothing.
func (s *scheduler) room(who []int) int {
	most := 0
	if s.open != nil {
		for _, r := range who {
			most = max(most, s.load[r])
		}
		if most+slotAlign > s.budget {
			s.close()
			most = 0
		}
	}
	if s.open == nil {
		s.open = &round{ranks: make([]work, s.ranks)}
		s.load = make([]int, s.ranks)
	}
	return s.budget - most
}

func (s *scheduler) close() {
	if s.open != nil {
		s.out.rounds = append(s.out.rounds, s.open)
		s.open = nil
	}
}

// addPart lets reader read the bytes from lo to hi in the slab of the region's first rank, and
// send them to the others.
func (s *scheduler) addPart(a *region, reader, lo, hi int) {
	w := &s.open.ranks[reader]
	first := a.who[0]
	for i := range a.runs {
		r := &a.runs[i]
		begin, end := max(lo, r.at(first, r.lo)), min(hi, r.at(first, r.hi))
		if begin >= end {
			continue
		}
		size := r.of.to.Size()
		from := r.lo + (begin-r.at(first, r.lo))/size
		to := from + (end-begin)/size
		s.load[reader] += max(end-begin, (to-from)*r.of.from)
		if !r.of.casts() {
			w.reads = append(w.reads, r.readTo(reader, from, to))
			continue
		}
		staged := w.stage((to - from) * r.of.from)
		w.reads = append(w.reads, r.readStaged(from, to, staged))
		w.copies = append(w.copies, copying{of: r.of, rows: 1, width: to - from, from: Range{0, to - from}, staged: staged, at: r.at(reader, from)})
	}
	for _, other := range a.who {
		if other != reader {
			s.open.sends = append(s.open.sends, send{from: reader, to: other, bytes: hi - lo,
				fromAt: lo + a.delta(reader), toAt: lo + a.delta(other)})
		}
	}
}

// stage takes bytes of the staging buffer.
func (w *work) stage(bytes int) int {
	at := w.staged
	w.staged = roundUp(at+bytes, slotAlign)
	return at
}

// addRows moves a tensor that is cut along a dimension behind the first: a rank reads whole
// rows, and the device cuts them.
func (s *scheduler) addRows(t *placed) {
	var who []int
	for rank, g := range t.flat.ranges {
		if g.Len > 0 {
			who = append(who, rank)
		}
	}
	rowBytes := t.flat.width * max(t.from, t.to.Size())
	if len(who) == 0 || rowBytes == 0 {
		return
	}
	for row := 0; row < t.flat.outer; {
		room := s.room(who)
		share := min((t.flat.outer-row+len(who)-1)/len(who), max(room/rowBytes, 1))
		for _, reader := range who {
			n := min(share, t.flat.outer-row)
			if n > 0 {
				s.addBox(t, who, reader, row, n)
				s.load[reader] += n * rowBytes
			}
			row += n
		}
	}
}

// addBox lets reader read n rows, and gives each rank its indices of the rows.
func (s *scheduler) addBox(t *placed, who []int, reader, row, n int) {
	w, f := &s.open.ranks[reader], &t.flat
	bytes := n * f.width * t.from
	staged := w.stage(bytes)
	w.reads = append(w.reads, read{file: t.file, off: t.off + int64(row*f.width*t.from), size: bytes, staged: true, at: staged})
	for _, rank := range who {
		g := f.ranges[rank]
		c := copying{of: t, rows: n, width: f.width, from: g, staged: staged, at: t.at[rank] + row*g.Len*t.to.Size()}
		if rank != reader {
			size := n * g.Len * t.to.Size()
			packed := w.stage(size)
			s.open.sends = append(s.open.sends, send{from: reader, to: rank, packed: true, fromAt: packed, toAt: c.at, bytes: size})
			c.packed, c.at = true, packed
		}
		w.copies = append(w.copies, c)
	}
}

// A segment is a part of a contiguous tensor, in elements, that is for the same ranks.
type segment struct {
	of     *placed
	lo, hi int
}

// at returns where an element lies in the slab of a rank that needs it.
func (r *segment) at(rank, element int) int {
	return r.of.at[rank] + (element-r.of.flat.ranges[rank].Start)*r.of.to.Size()
}

func (r *segment) offset(element int) int64 { return r.of.off + int64(element*r.of.from) }

func (r *segment) readTo(rank, lo, hi int) read {
	return read{file: r.of.file, off: r.offset(lo), size: (hi - lo) * r.of.from, at: r.at(rank, lo)}
}

func (r *segment) readStaged(lo, hi, at int) read {
	return read{file: r.of.file, off: r.offset(lo), size: (hi - lo) * r.of.from, staged: true, at: at}
}

// A region is runs for the same ranks that follow each other in the memory of each of these
// ranks, with nothing between them but padding.
type region struct {
	who  []int
	runs []segment
}

func (a *region) end(rank int) int {
	last := &a.runs[len(a.runs)-1]
	return last.at(rank, last.hi)
}

// delta returns the distance between the region's place in the slab of a rank and its place in
// the slab of its first rank.
func (a *region) delta(rank int) int {
	return a.runs[0].at(rank, a.runs[0].lo) - a.runs[0].at(a.who[0], a.runs[0].lo)
}

// joins reports whether r continues the region on all ranks. The gap between them must be
// padding, because it is sent too.
func (a *region) joins(r *segment, who []int) bool {
	if len(a.runs) == 0 || !slices.Equal(a.who, who) {
		return false
	}
	last := &a.runs[len(a.runs)-1]
	gap := r.at(who[0], r.lo) - a.end(who[0])
	if gap < 0 || gap >= slotAlign {
		return false
	}
	for _, rank := range who {
		if r.at(rank, r.lo)-a.end(rank) != gap {
			return false
		}
		before, after := last.of.flat.ranges[rank], r.of.flat.ranges[rank]
		if gap > 0 && (last.hi != before.Start+before.Len || r.lo != after.Start) {
			return false
		}
	}
	return true
}
