package checkpoint

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sort"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
)

// A rect is a rectangle of a tensor's elements, seen as a matrix of rows of one width.
type rect struct{ row, col, rows, cols int }

func (r rect) empty() bool { return r.rows <= 0 || r.cols <= 0 }

func (r rect) elements() int { return r.rows * r.cols }

// and returns the elements that are in both rectangles.
func (r rect) and(o rect) rect {
	row, col := max(r.row, o.row), max(r.col, o.col)
	return rect{row, col, min(r.row+r.rows, o.row+o.rows) - row, min(r.col+r.cols, o.col+o.cols) - col}
}

// minus returns the elements of r that are not in o, which is inside of r.
func (r rect) minus(o rect) []rect {
	return slices.DeleteFunc([]rect{
		{r.row, r.col, o.row - r.row, r.cols},
		{o.row, r.col, o.rows, o.col - r.col},
		{o.row, o.col + o.cols, o.rows, r.col + r.cols - o.col - o.cols},
		{o.row + o.rows, r.col, r.row + r.rows - o.row - o.rows, r.cols},
	}, rect.empty)
}

// cut divides r into rectangles of at most most elements.
func (r rect) cut(most int) (list []rect) {
	rows, cols := max(1, min(r.rows, most/r.cols)), min(r.cols, max(most, 1))
	for i := 0; i < r.rows; i += rows {
		for j := 0; j < r.cols; j += cols {
			list = append(list, rect{r.row + i, r.col + j, min(rows, r.rows-i), min(cols, r.cols-j)})
		}
	}
	return list
}

// rectsOfRun returns a run of n elements of a tensor, from element at on, as rectangles of rows of the
// given width: the end of a row, whole rows, and the beginning of one.
func rectsOfRun(at, n, width int) (list []rect) {
	for n > 0 {
		r := rect{at / width, at % width, 1, min(width-at%width, n)}
		if r.col == 0 && n >= width {
			r.rows = n / width
		}
		list = append(list, r)
		at, n = at+r.elements(), n-r.elements()
	}
	return list
}

// rects returns the elements of a part as rectangles of rows of the given
// width, which must divide the width of the box's rows, in ascending order.
func (b box) rects(width int) (list []rect) {
	if b.elements() == 0 {
		return nil
	}
	if b.Width == width {
		return []rect{{0, b.Start, b.Rows, b.Len}}
	}
	for row := range b.Rows {
		list = append(list, rectsOfRun(row*b.Width+b.Start, b.Len, width)...)
	}
	return list
}

// place returns where the part's memory has a rectangle of rows of the given width: the number of its first element, and the
// distance between its rows.
func (b box) place(r rect, width int) (first, stride int) {
	if b.Width == width {
		return r.row*b.Len + r.col - b.Start, b.Len
	}
	at := r.row*width + r.col
	return at/b.Width*b.Len + at%b.Width - b.Start, width
}

// A piece is elements of a tensor that go from a part of one rank to a part of another, or of the same one.
type piece struct {
	name             string
	from, to         int // ranks
	src, dst         *partInfo
	at               rect
	width            int // of the rows that at counts
	wire             memory.DType
	forwards         bool // src is the wanted part of from, which has received it in an earlier round
	srcPack, dstPack bool // the bytes go through the scratch memory of the rank
	srcAt, dstAt     int  // there
}

func (p *piece) bytes() int { return p.at.elements() * p.wire.Size() }

func (p *partInfo) dtype() memory.DType { return dtypes[p.Format] }

// contiguous reports whether the piece is a run of the memory of a part.
func (p *piece) contiguous(part *partInfo) bool {
	_, stride := part.Box.place(p.at, p.width)
	return p.at.rows == 1 || p.at.cols == stride
}

// A transferRound is pieces that are packed, sent and unpacked together.
type transferRound struct {
	pieces []*piece
	sends  []transferSend
}

// A transferSend is bytes that one rank sends another: a piece, or several that follow each other in the scratch
// memory of both.
type transferSend struct {
	*piece // the first
	bytes  int
}

const (
	// packedPiece is the size below which pieces are packed, so that many are one message.
	packedPiece = 64 << 10
	// balancedPiece is the least size of the pieces that several ranks with the same elements send.
	balancedPiece = 1 << 20
	// packAlign is the alignment of pieces in scratch memory.
	packAlign = 16
	// maxRoundPieces limits the messages of a round.
	maxRoundPieces = 1024
)

// A transferPlanner computes the rounds of a transfer. All ranks compute the same.
type transferPlanner struct {
	budget  int   // scratch memory of a rank
	sent    []int // bytes, by rank
	turn    int   // of the ranks that forward
	used    []int // of the scratch memory in the open round, by rank
	open    []*piece
	pending []*piece // forwards of pieces in the open round
	rounds  []*transferRound
	scratch []int // that the rounds need, by rank
}

// A holder is a rank's part of a tensor.
type holder struct {
	rank  int
	info  *partInfo
	rects []rect
}

// planTransfer returns the rounds that fill the wanted parts of all ranks from the parts that they have, and the
// scratch memory of each rank.
func planTransfer(dst, src [][]partInfo, budget int) (rounds []*transferRound, scratch []int, err error) {
	n := len(dst)
	p := &transferPlanner{budget: budget, sent: make([]int, n), used: make([]int, n), scratch: make([]int, n)}
	has, wants := byTensor(src), byTensor(dst)
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		if err := p.add(name, wants[name], has[name]); err != nil {
			return nil, nil, fmt.Errorf("tensor %q: %w", name, err)
		}
	}
	for len(p.open) > 0 {
		p.close()
	}
	return p.rounds, p.scratch, nil
}

func byTensor(by [][]partInfo) map[string][]*holder {
	all := map[string][]*holder{}
	for rank, parts := range by {
		for i := range parts {
			all[parts[i].Name] = append(all[parts[i].Name], &holder{rank: rank, info: &parts[i]})
		}
	}
	return all
}

// add adds the pieces of a tensor.
func (p *transferPlanner) add(name string, wants, has []*holder) error {
	first, all := wants[0], slices.Concat(wants, has)
	width := max(first.info.Box.Width, 1)
	for _, h := range all {
		if !h.info.fits() {
			return fmt.Errorf("rank %d describes a part that does not fit shape %v: %w", h.rank, h.info.Shape, comm.ErrMismatch)
		}
		if !slices.Equal(h.info.Shape, first.info.Shape) {
			return fmt.Errorf("it has shape %v on rank %d and %v on rank %d: want the shape of the whole tensor on all ranks: %w", first.info.Shape, first.rank, h.info.Shape, h.rank, comm.ErrMismatch)
		}
		width = min(width, max(h.info.Box.Width, 1))
	}
	for _, h := range has {
		if h.info.Format != has[0].info.Format {
			return fmt.Errorf("rank %d has it as %s and rank %d as %s: want one type on the ranks that have it: %w", has[0].rank, has[0].info.Format, h.rank, h.info.Format, comm.ErrMismatch)
		}
	}
	for _, h := range all {
		h.rects = h.info.Box.rects(width)
	}
	for _, want := range wants {
		for _, r := range want.rects {
			if err := p.cover(&piece{name: name, to: want.rank, dst: want.info, at: r, width: width}, has, wants); err != nil {
				return err
			}
		}
	}
	return nil
}

// fits reports whether the box describes a part of a tensor of the shape, and
// the format is a type of device memory. It trusts no number, because the
// description may be another process's.
func (p *partInfo) fits() bool {
	size := dtypes[p.Format].Size()
	if size == 0 || slices.ContainsFunc(p.Shape, func(n int) bool { return n < 0 }) || !fits(p.Shape, size) {
		return false
	}
	n, b := product(p.Shape), p.Box
	if n == 0 {
		return b == box{Rows: 1}
	}
	for dim := range len(p.Shape) + 1 {
		if width := product(p.Shape[dim:]); b.Width == width && b.Rows == n/width {
			return b.Start >= 0 && b.Len >= 0 && b.Len <= width-b.Start
		}
	}
	return false
}

// cover adds pieces for the elements of x, from the ranks that have them to all ranks that want them. It divides them until
// each rank has or wants all elements of a piece, or none. The first rank that wants a piece adds it for all.
func (p *transferPlanner) cover(x *piece, has, wants []*holder) error {
	var full, who []*holder
	for k, h := range slices.Concat(has, wants) {
		i := sort.Search(len(h.rects), func(i int) bool { return h.rects[i].row+h.rects[i].rows > x.at.row })
		for ; i < len(h.rects) && h.rects[i].row < x.at.row+x.at.rows; i++ {
			both := x.at.and(h.rects[i])
			if both == x.at {
				if k < len(has) {
					full = append(full, h)
				} else {
					who = append(who, h)
				}
				break
			}
			if both.empty() {
				continue
			}
			for _, r := range append([]rect{both}, x.at.minus(both)...) {
				part := *x
				part.at = r
				if err := p.cover(&part, has, wants); err != nil {
					return err
				}
			}
			return nil
		}
	}
	if len(full) == 0 {
		first, n := x.at.row*x.width+x.at.col, x.at.cols
		if n == x.width {
			n = x.at.elements()
		}
		return fmt.Errorf("no rank has elements %d to %d of shape %v, in row-major order, which rank %d wants: %w", first, first+n-1, x.dst.Shape, x.to, comm.ErrMismatch)
	}
	if x.to == who[0].rank {
		p.choose(x, full, who)
	}
	return nil
}

// choose brings the elements of x from the ranks that have them to those that want them.
func (p *transferPlanner) choose(x *piece, full, who []*holder) {
	byType := map[memory.DType][]*holder{}
	var types []memory.DType
	for _, want := range who {
		if i := slices.IndexFunc(full, func(h *holder) bool { return h.rank == want.rank }); i >= 0 { // a copy on the device
			part := *x
			part.from, part.src, part.to, part.dst, part.wire = want.rank, full[i].info, want.rank, want.info, full[i].info.dtype()
			p.put(&part)
			continue
		}
		to := want.info.dtype()
		if byType[to] == nil {
			types = append(types, to)
		}
		byType[to] = append(byType[to], want)
	}
	for _, to := range types {
		group := byType[to]
		if x.wire = full[0].info.dtype(); to.Size() < x.wire.Size() { // the sender converts to the shorter type
			x.wire = to
		}
		// If more ranks want the elements than have them, each element is sent once, and the receivers exchange what they have, like
		// the readers of a load.
		if len(group) > len(full) && x.wire == to {
			p.share(x, full, group)
			continue
		}
		for _, want := range group {
			for _, r := range x.at.cut(p.most(x, len(full))) {
				p.send(x, r, full, want)
			}
		}
	}
}

// most returns how many elements of x go at once if so many ranks share the work.
func (p *transferPlanner) most(x *piece, ranks int) int {
	size := x.wire.Size()
	share := (x.at.elements() + ranks - 1) / ranks
	return max(1, min(max(share, balancedPiece/size), p.budget/4/size))
}

// share sends each element of x to one of the ranks that want it, which forward it to the others.
func (p *transferPlanner) share(x *piece, full, group []*holder) {
	for _, r := range x.at.cut(p.most(x, len(group))) {
		first := group[p.turn%len(group)]
		p.turn++
		p.send(x, r, full, first)
		for _, other := range group {
			if other != first {
				part := *x
				part.at, part.from, part.src, part.to, part.dst, part.forwards = r, first.rank, first.info, other.rank, other.info, true
				part.pack()
				p.pending = append(p.pending, &part)
			}
		}
	}
}

// send adds the elements r of x from the rank that has them and has the least to send.
func (p *transferPlanner) send(x *piece, r rect, full []*holder, want *holder) {
	least := slices.MinFunc(full, func(a, b *holder) int { return cmp.Compare(p.sent[a.rank], p.sent[b.rank]) })
	part := *x
	part.at, part.from, part.src, part.to, part.dst = r, least.rank, least.info, want.rank, want.info
	p.sent[part.from] += part.bytes()
	part.pack()
	p.put(&part)
}

// pack decides which ranks need scratch memory for the piece.
func (x *piece) pack() {
	small := x.bytes() < packedPiece
	x.srcPack = small || x.wire != x.src.dtype() || !x.contiguous(x.src)
	x.dstPack = small || x.wire != x.dst.dtype() || !x.contiguous(x.dst)
}

// put adds a piece to the open round, or to the next one.
func (p *transferPlanner) put(x *piece) {
	need := roundUp(x.bytes(), packAlign)
	for len(p.open) > 0 && (len(p.open) == maxRoundPieces || x.srcPack && p.used[x.from]+need > p.budget || x.dstPack && p.used[x.to]+need > p.budget) {
		p.close() // the next round may be full of forwards
	}
	if x.srcPack {
		p.used[x.from] += need
	}
	if x.dstPack {
		p.used[x.to] += need
	}
	p.open = append(p.open, x)
}

// close ends the open round: it gives the pieces their places, and joins those that follow each other at both ranks. The
// next round begins with the forwards of the pieces of this one.
func (p *transferPlanner) close() {
	if len(p.open) == 0 {
		return
	}
	r := &transferRound{pieces: p.open}
	p.open = nil
	slices.SortStableFunc(r.pieces, func(a, b *piece) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	clear(p.used)
	for _, x := range r.pieces {
		size := roundUp(x.bytes(), packAlign)
		if x.srcPack {
			x.srcAt = p.used[x.from]
			p.used[x.from] += size
		}
		if x.dstPack {
			x.dstAt = p.used[x.to]
			p.used[x.to] += size
		}
		switch last := len(r.sends) - 1; {
		case x.from == x.to:
		case last >= 0 && r.sends[last].joins(x):
			r.sends[last].bytes = x.srcAt - r.sends[last].srcAt + x.bytes()
		default:
			r.sends = append(r.sends, transferSend{x, x.bytes()})
		}
	}
	for rank, n := range p.used {
		p.scratch[rank] = max(p.scratch[rank], n)
	}
	clear(p.used)
	p.rounds = append(p.rounds, r)
	ready := p.pending
	p.pending = nil
	for _, x := range ready {
		p.put(x)
	}
}

// joins reports whether x, the piece after those of s, follows their bytes in the scratch memory of both ranks.
func (s *transferSend) joins(x *piece) bool {
	return s.from == x.from && s.to == x.to && s.srcPack && s.dstPack && x.srcPack && x.dstPack
}
