package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/tensor"
)

// RestoreConfig are the options of Saved.Restore; nil means their defaults. They must be the
// same on all ranks.
type RestoreConfig struct {
	// Rename returns the name in the checkpoint of a part's tensor. nil is the same name.
	Rename func(name string) string
	// Partial accepts that the checkpoint lacks tensors, whose memory stays unchanged.
	Partial bool
	// RoundBytes is the most memory of a device that Restore needs besides the parts, and as
	// much again where ranks exchange rows. A larger tensor needs its own size. 0 is 256 MiB.
	RoundBytes int
}

// Restored says what Restore did not use.
type Restored struct {
	Missing []string // parts whose tensors the checkpoint lacks, by the names of the parts
	Unused  []string // tensors of the checkpoint that no part has
}

// Restore fills the parts of each local rank from the checkpoint, whatever number of ranks
// saved it and however they had cut the tensors. The device converts elements to the type of a
// part. The ranks read each byte that they need once, and exchange it over the group. Restore
// comes after the work on the group's streams, and returns when the parts are complete; other
// streams must not use them meanwhile. Collective.
func (s *Saved) Restore(ctx context.Context, g *comm.Group, parts [][]Part, cfg *RestoreConfig) (*Restored, error) {
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: restore: %w", err)
	}
	if err := s.given("restore"); err != nil {
		return nil, err
	}
	r := &restoring{saved: s, peers: w, parts: parts}
	r.cfg = *cmp.Or(cfg, new(RestoreConfig))
	if r.cfg.RoundBytes <= 0 {
		r.cfg.RoundBytes = defaultRound
	}
	if r.by, err = exchange(ctx, w, "restore", s.folder, parts); err != nil {
		return nil, err
	}
	res, err := r.agreeToMatch(ctx)
	if err != nil {
		return nil, err
	}
	return res, r.run(ctx)
}

// restoring is a call of Restore.
type restoring struct {
	*peers
	saved *Saved
	cfg   RestoreConfig
	parts [][]Part
	by    [][]partInfo       // by rank
	named []map[string]*Part // by local rank
	moves []*move
}

// A move is a rectangle of a stored part with the places in the parts of the ranks.
type move struct {
	placed
	name      string // of the part
	toRow     int    // of the ranks' parts
	rows      int
	toColumns []int // by rank
	width     []int // of the rows of the ranks' parts
}

// wanted is what the ranks want of one tensor.
type wanted struct {
	name        string
	rows, width int
	cols        []Range     // by rank
	parts       []*partInfo // by rank; nil if the rank has no part
}

// agreeToMatch computes the moves, and compares the checkpoints and the moves of all ranks. If one
// rank refuses, all ranks return its reason, because the other ranks would wait for its bytes.
func (r *restoring) agreeToMatch(ctx context.Context) (*Restored, error) {
	res, err := r.match()
	errs := make([]error, len(r.locals))
	if err != nil {
		errs[0] = fmt.Errorf("checkpoint: restore %s: %w", r.saved.folder, err)
	}
	type opened struct {
		ID           string
		Step         int64
		Folder, Plan string
	}
	m := r.saved.m
	mine := opened{m.ID, m.Step, r.saved.folder, r.fingerprint(placedOf(r.moves), r.cfg.RoundBytes)}
	err = agree(ctx, r.peers, "checkpoint: restore "+r.saved.folder, slices.Repeat([]opened{mine}, len(errs)), errs, func(all []collective.Said[opened]) error {
		first := all[0].Value
		for rank, x := range all {
			if x := x.Value; x.ID != first.ID || x.Step != first.Step {
				return fmt.Errorf("checkpoint: restore %s: rank %d has opened step %d (save %s), and rank 0 step %d (save %s) in %s: all ranks must open the same save, as Latest does",
					safe.Text(x.Folder), rank, x.Step, safe.Text(x.ID), first.Step, safe.Text(first.ID), safe.Text(first.Folder))
			}
		}
		if err := firstFailed(r.peers, "restore", all, errs); err != nil {
			return err
		}
		return samePlans("restore", r.saved.folder, all, func(x opened) string { return x.Plan })
	})
	if err != nil {
		return nil, err
	}
	return res, nil
}

// match computes the moves for all parts.
func (r *restoring) match() (*Restored, error) {
	res := &Restored{}
	used := map[string]bool{}
	stored := make(map[string]*savedTensor, len(r.saved.m.Tensors))
	for i := range r.saved.m.Tensors {
		stored[r.saved.m.Tensors[i].Name] = &r.saved.m.Tensors[i]
	}
	for _, x := range r.wanted() {
		from := x.name
		if r.cfg.Rename != nil {
			from = r.cfg.Rename(x.name)
		}
		t := stored[from]
		if t == nil {
			res.Missing = append(res.Missing, x.name)
			continue
		}
		used[from] = true
		if err := r.matchOne(x, t); err != nil {
			return nil, err
		}
	}
	for _, t := range r.saved.m.Tensors {
		if !used[t.Name] {
			res.Unused = append(res.Unused, t.Name)
		}
	}
	if len(res.Missing) > 0 && !r.cfg.Partial {
		return nil, fmt.Errorf("the checkpoint lacks tensors %q: set Partial to leave them as they are", res.Missing)
	}
	return res, nil
}

// wanted returns the wishes of all ranks, sorted by the first rank that has a part.
func (r *restoring) wanted() []*wanted {
	var list []*wanted
	byName := map[string]*wanted{}
	for rank, parts := range r.by {
		for i := range parts {
			p := &parts[i]
			x := byName[p.Name]
			if x == nil {
				x = &wanted{name: p.Name, rows: 1, width: product(p.Shape), cols: make([]Range, r.ranks), parts: make([]*partInfo, r.ranks)}
				byName[p.Name] = x
				list = append(list, x)
			}
			if !p.whole() {
				x.rows, x.width = p.Box.Rows, p.Box.Width
			}
			x.cols[rank], x.parts[rank] = Range{p.Box.Start, p.Box.Len}, p
		}
	}
	for _, x := range list {
		for rank, p := range x.parts {
			if p != nil && p.whole() {
				x.cols[rank] = Range{0, x.width}
			}
		}
	}
	return list
}

// matchOne computes the moves for one tensor.
func (r *restoring) matchOne(x *wanted, t *savedTensor) error {
	for rank, p := range x.parts {
		switch {
		case p == nil:
		case !slices.Equal(p.Shape, t.Shape):
			return fmt.Errorf("tensor %q has shape %v: rank %d wants %v", t.Name, t.Shape, rank, p.Shape)
		case !p.whole() && (p.Box.Rows != x.rows || p.Box.Width != x.width):
			return fmt.Errorf("tensor %q is cut along different dimensions by different ranks: want one", x.name)
		}
	}
	for i := range t.Parts {
		p := &t.Parts[i]
		switch {
		case t.Rows*p.Len == 0:
		case t.Rows == x.rows && t.Width == x.width:
			r.rect(x, p, 0, rect{0, p.Start, t.Rows, p.Len})
		default:
			for row := range t.Rows { // a run of the tensor each
				r.matchRun(x, p, row*p.Len, row*t.Width+p.Start, p.Len)
			}
		}
	}
	return nil
}

// matchRun computes the moves for a run of n elements. The run begins at element at of the tensor, which is
// element from of the stored part.
func (r *restoring) matchRun(x *wanted, p *savedPart, from, at, n int) {
	for _, q := range rectsOfRun(at, n, x.width) {
		r.rect(x, p, from, q)
		from += q.elements()
	}
}

// rect adds a move of a rectangle of the tensor, which begins at element from of the stored part.
func (r *restoring) rect(x *wanted, p *savedPart, from int, q rect) {
	row, rows, width, column := q.row, q.rows, q.cols, q.col
	at := r.saved.files.where[p.Key]
	info, _ := r.saved.files.Info(p.Key)
	size := info.Format.Bits() / 8
	m := &move{name: x.name, toRow: row, rows: rows, toColumns: make([]int, r.ranks), width: make([]int, r.ranks)}
	m.info, m.file, m.from, m.to = info, at.file, size, info.DType
	m.off = r.saved.files.headers[at.file].Tensors[at.tensor].Begin + int64(from*size)
	m.cut = division{outer: rows, width: width, inner: 1, ranges: make([]Range, r.ranks), owner: -1}
	some := false
	for rank, want := range x.cols {
		lo, hi := max(want.Start, column), min(want.Start+want.Len, column+width)
		if lo >= hi {
			continue
		}
		some = true
		m.cut.ranges[rank] = Range{lo - column, hi - lo}
		m.toColumns[rank], m.width[rank] = lo-want.Start, want.Len
	}
	if !some {
		return
	}
	m.flat = m.cut.flat()
	r.moves = append(r.moves, m)
}

// run executes all moves, in rounds that fit into memory.
func (r *restoring) run(ctx context.Context) error {
	r.named = make([]map[string]*Part, len(r.parts))
	for local, parts := range r.parts {
		r.named[local] = make(map[string]*Part, len(parts))
		for i := range parts {
			r.named[local][parts[i].Name] = &parts[i]
		}
	}
	for len(r.moves) > 0 {
		n, load := 0, make([]int, r.ranks)
		for ; n < len(r.moves); n++ {
			for rank := range load {
				load[rank] += roundUp(r.moves[n].bytes(rank), slotAlign)
			}
			if n > 0 && slices.Max(load) > r.cfg.RoundBytes {
				break
			}
		}
		if err := r.round(ctx, r.moves[:n]); err != nil {
			return err
		}
		r.moves = r.moves[n:]
	}
	return nil
}

func (r *restoring) round(ctx context.Context, moves []*move) error {
	tensors := placedOf(moves)
	w, err := peersOf(r.group)
	if err != nil {
		return fmt.Errorf("checkpoint: restore: %w", err)
	}
	// Each rank has two staging buffers, and each may have the rows that it reads and the parts of the
	// other ranks: together four times the bytes of a round.
	cfg := &LoadConfig{RoundBytes: max(r.cfg.RoundBytes/4, 1)}
	all, err := r.saved.files.loadPlaced(ctx, w, cfg, func() ([]*placed, error) { return tensors, w.prepare() })
	if err != nil {
		return err
	}
	errs := make([]error, len(w.locals))
	for i, l := range w.locals {
		for _, m := range moves {
			if errs[i] == nil && m.bytes(l.rank) > 0 {
				errs[i] = m.put(l, all[i], r.named[i][m.name])
			}
		}
		if errs[i] == nil {
			errs[i] = l.stream.Sync(ctx)
		}
	}
	return errors.Join(w.agree(ctx, "restore", r.saved.folder, errs, ""), closeAll(all))
}

func placedOf(moves []*move) []*placed {
	tensors := make([]*placed, len(moves))
	for i, m := range moves {
		tensors[i] = &m.placed
	}
	return tensors
}

// put copies a rank's rectangle from the slab to its part.
func (m *move) put(l *local, w *Weights, p *Part) error {
	n := m.cut.ranges[l.rank].Len
	from, err := cutOut(w.slab, m.at[l.rank], m.to, m.rows, n)
	if err != nil {
		return err
	}
	to, err := p.Data.View(-1)
	if err == nil {
		to, err = to.View(to.Len()/m.width[l.rank], m.width[l.rank])
	}
	if err == nil {
		to, err = to.Narrow(0, m.toRow, m.rows)
	}
	if err == nil {
		to, err = to.Narrow(1, m.toColumns[l.rank], n)
	}
	if err == nil {
		err = to.RecordStream(l.stream)
	}
	if err == nil {
		err = tensor.Copy(l.stream, to, from)
	}
	if err != nil {
		return &TensorError{Op: "restore", Path: m.info.File, Tensor: m.name, Offset: -1, Err: err}
	}
	return nil
}
