package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// TransferConfig are the options of NewTransfer; nil means their defaults. They must be the same on all
// ranks.
type TransferConfig struct {
	// RoundBytes is the most scratch memory of a device, for elements that are converted, are not contiguous
	// or are few. 0 is 256 MiB.
	RoundBytes int
}

// A Transfer moves parts of tensors between the ranks of a group, such as the weights of a training to inference
// engines that cut them differently and have them in a shorter type. Its methods are collective, and for one
// goroutine.
type Transfer struct {
	peers  *peers
	locals []*transferLocal
	rounds [][]transferWork // by round and local rank
	graphs gpu.Graphs       // that have captured Run
	closed bool
}

// A transferLocal is a local rank.
type transferLocal struct {
	*local
	src, dst map[string]*Part
	scratch  tensor.Tensor // bytes; the zero Tensor if there are none
}

// transferWork is the part of a local rank in a round.
type transferWork struct {
	packTo, packFrom     []tensor.Tensor
	messages             []message
	unpackTo, unpackFrom []tensor.Tensor
}

// A message is bytes that a rank sends or receives.
type message struct {
	peer  int
	sends bool
	mem   memory.Slice[byte]
}

// NewTransfer prepares a Transfer to the parts dst, which ranks want, from the parts src, which ranks have. Both have the
// parts of each local rank; nil means that no local rank has any. The ranks exchange descriptions of their
// parts here, and not in Run. The memory of the parts stays the same for all runs. NewTransfer waits for the
// operations on the group's streams. Collective.
//
// Wanted parts may be cut along other dimensions than those that ranks have, and have another type, which a device
// converts as tensor.Copy does: the sender if the wanted type is shorter, and otherwise the receiver. If
// several ranks have an element, they share the work of sending it; a rank that has what it wants copies it. If more ranks
// want an element in one type than have it, it is sent once, and the receivers forward it to each other.
//
// All ranks return an error if no rank has an element that a rank wants, if ranks describe a tensor by
// different shapes, or if they have it in different types. The error names the tensor, the ranks and the elements. A part
// that a rank wants must not share memory with its other parts.
func NewTransfer(ctx context.Context, g *comm.Group, dst, src [][]Part, cfg *TransferConfig) (*Transfer, error) {
	const op = "new transfer"
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", op, err)
	}
	budget := defaultRound
	if cfg != nil && cfg.RoundBytes != 0 {
		budget = cfg.RoundBytes
	}
	t := &Transfer{peers: w}
	mine, errs := t.describe(op, dst, src)
	if budget < 0 {
		errs[0] = fmt.Errorf("checkpoint: %s: RoundBytes is %d: want 0 or more", op, budget)
	}
	for i := range mine {
		mine[i].Budget = budget
		if ctx.Err() != nil {
			errs[i] = fmt.Errorf("checkpoint: %s: %w", op, context.Cause(ctx))
		}
	}
	var rounds []*transferRound
	var scratch []int
	if err := agree(ctx, w, "checkpoint: "+op, mine, errs, func(all []collective.Said[transferInfo]) (err error) {
		if err := firstFailed(w, op, all, errs); err != nil {
			return err
		}
		wants, has := make([][]partInfo, w.ranks), make([][]partInfo, w.ranks)
		for rank, x := range all {
			if wants[rank], has[rank] = x.Value.Dst, x.Value.Src; x.Value.Budget != all[0].Value.Budget {
				return fmt.Errorf("checkpoint: %s: rank %d has rounds of %d bytes and rank 0 of %d: give the same RoundBytes on all ranks", op, rank, x.Value.Budget, all[0].Value.Budget)
			}
		}
		if rounds, scratch, err = planTransfer(wants, has, budget); err != nil {
			err = fmt.Errorf("checkpoint: %s: %w", op, err)
		}
		return err
	}); err != nil {
		return nil, err
	}
	errs = t.build(rounds, scratch)
	if err := w.agree(ctx, op, "between ranks", errs, ""); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// transferInfo is what ranks exchange.
type transferInfo struct {
	Dst, Src []partInfo
	Budget   int // the bytes of a round
}

// describe checks and describes the parts of the local ranks.
func (t *Transfer) describe(op string, dst, src [][]Part) ([]transferInfo, []error) {
	infos, errs := make([]transferInfo, len(t.peers.locals)), make([]error, len(t.peers.locals))
	for i, l := range t.peers.locals {
		x := &transferLocal{local: l}
		t.locals = append(t.locals, x)
		if err := gpu.StreamOf(l.stream).RefuseWait("checkpoint: " + op); err != nil {
			errs[i] = err
			continue
		}
		var lists [2][]Part
		for k, list := range [][][]Part{dst, src} {
			if list != nil && len(list) != len(t.peers.locals) {
				errs[i] = fmt.Errorf("checkpoint: %s: parts of %d ranks: want one list for each of %d local ranks", op, len(list), len(t.peers.locals))
			} else if list != nil {
				lists[k] = list[i]
			}
		}
		if errs[i] != nil {
			continue
		}
		if infos[i].Dst, errs[i] = describeParts(op, l.stream, lists[0]); errs[i] == nil {
			infos[i].Src, errs[i] = describeParts(op, l.stream, lists[1])
		}
		if errs[i] == nil {
			errs[i] = apartFromAll(op, lists[0], lists[1])
		}
		x.dst, x.src = namedParts(lists[0]), namedParts(lists[1])
	}
	return infos, errs
}

func namedParts(parts []Part) map[string]*Part {
	all := make(map[string]*Part, len(parts))
	for i := range parts {
		all[parts[i].Name] = &parts[i]
	}
	return all
}

// apartFromAll returns an error if a wanted part shares memory with another part.
func apartFromAll(op string, dst, src []Part) error {
	all := append(slices.Clone(dst), src...)
	order := make([]int, 0, len(all))
	for i := range all {
		if all[i].Data.Len() > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(all[a].Data.Ptr(), all[b].Data.Ptr()) })
	var end, wantedEnd uint64 // of the parts so far
	var last, lastWanted int
	for _, i := range order {
		at, other := all[i].Data.Ptr(), -1
		switch {
		case i < len(dst) && at < end:
			other = last
		case i >= len(dst) && at < wantedEnd:
			other = lastWanted
		}
		if other >= 0 {
			return fmt.Errorf("checkpoint: %s: the parts of tensors %q and %q share memory, and one is to be written", op, all[other].Name, all[i].Name)
		}
		next := at + uint64(all[i].Data.Bytes())
		if next > end {
			end, last = next, i
		}
		if i < len(dst) && next > wantedEnd {
			wantedEnd, lastWanted = next, i
		}
	}
	return nil
}

// build allocates the scratch memory and prepares the work of the local ranks.
// Its errors are by local rank.
func (t *Transfer) build(rounds []*transferRound, scratch []int) []error {
	errs := make([]error, len(t.locals))
	t.rounds = make([][]transferWork, len(rounds))
	for i := range rounds {
		t.rounds[i] = make([]transferWork, len(t.locals))
	}
	for k, l := range t.locals {
		if n := scratch[l.rank]; n > 0 {
			if l.scratch, errs[k] = tensor.Make(l.stream, memory.Uint8, n); errs[k] != nil {
				errs[k] = fmt.Errorf("%d bytes of scratch memory: %w", n, errs[k])
			}
		}
		for i, r := range rounds {
			if errs[k] == nil {
				errs[k] = l.build(&t.rounds[i][k], r)
			}
		}
	}
	return errs
}

// build prepares the work of a rank in a round.
func (l *transferLocal) build(w *transferWork, r *transferRound) error {
	for _, x := range r.pieces {
		if x.from != l.rank && x.to != l.rank {
			continue
		}
		if err := l.addCopies(w, x); err != nil {
			return fmt.Errorf("tensor %q: %w", x.name, err)
		}
	}
	for i := range r.sends {
		s := &r.sends[i]
		var m message
		var err error
		switch l.rank {
		case s.from:
			m.peer, m.sends = s.to, true
			m.mem, err = l.bytes(s, s.srcPack, s.srcAt, l.source(s.piece), s.src)
		case s.to:
			m.peer = s.from
			m.mem, err = l.bytes(s, s.dstPack, s.dstAt, l.dst[s.name], s.dst)
		default:
			continue
		}
		if err != nil {
			return fmt.Errorf("tensor %q: %w", s.name, err)
		}
		w.messages = append(w.messages, m)
	}
	return nil
}

// source returns the part that a piece comes from.
func (l *transferLocal) source(x *piece) *Part {
	if x.forwards {
		return l.dst[x.name]
	}
	return l.src[x.name]
}

// addCopies adds the copies of a piece on the device of the rank.
func (l *transferLocal) addCopies(w *transferWork, x *piece) error {
	var src, dst tensor.Tensor
	var err error
	if x.from == l.rank && (x.srcPack || x.to == l.rank) {
		if src, err = x.of(l.source(x), x.src); err != nil {
			return err
		}
	}
	if x.to == l.rank && (x.dstPack || x.from == l.rank) {
		if dst, err = x.of(l.dst[x.name], x.dst); err != nil {
			return err
		}
	}
	switch {
	case x.from == x.to:
		w.unpackTo, w.unpackFrom = append(w.unpackTo, dst), append(w.unpackFrom, src)
	case x.from == l.rank && x.srcPack:
		if dst, err = cutOut(l.scratch, x.srcAt, x.wire, x.at.rows, x.at.cols); err != nil {
			return err
		}
		w.packTo, w.packFrom = append(w.packTo, dst), append(w.packFrom, src)
	case x.to == l.rank && x.dstPack:
		if src, err = cutOut(l.scratch, x.dstAt, x.wire, x.at.rows, x.at.cols); err != nil {
			return err
		}
		w.unpackTo, w.unpackFrom = append(w.unpackTo, dst), append(w.unpackFrom, src)
	}
	return nil
}

// of returns the elements of the piece in a part.
func (x *piece) of(p *Part, info *partInfo) (tensor.Tensor, error) {
	all, err := p.Data.View(-1)
	if err != nil {
		return all, err
	}
	first, stride := info.Box.place(x.at, x.width)
	if x.contiguous(info) {
		if all, err = all.Narrow(0, first, x.at.elements()); err != nil {
			return all, err
		}
		return all.View(x.at.rows, x.at.cols)
	}
	// Several rows begin where the part has whole rows, or those of its own range.
	column := x.at.col
	if info.Box.Width == x.width {
		column -= info.Box.Start
	}
	if all, err = all.Narrow(0, first-column, x.at.rows*stride); err == nil {
		if all, err = all.View(x.at.rows, stride); err == nil {
			all, err = all.Narrow(1, column, x.at.cols)
		}
	}
	return all, err
}

// bytes returns the memory of a message: scratch memory, or elements of a part.
func (l *transferLocal) bytes(s *transferSend, packed bool, at int, p *Part, info *partInfo) (memory.Slice[byte], error) {
	if packed {
		return view(l.scratch, at, s.bytes)
	}
	first, _ := info.Box.place(s.at, s.width)
	return memory.View[byte](p.Data.Buffer(), p.Data.Offset()+first*p.Data.DType().Size(), s.bytes)
}

// Run enqueues the transfer on the group's streams, and does not wait. The parts that ranks have must be ordered with
// these streams, as for a collective, and may change after the streams have passed the transfer; the wanted parts are
// complete then. [comm.Group.Between] orders other streams.
//
// The group's errors tell if a rank fails meanwhile: Run, or the group's Wait, returns an error that matches comm.ErrBroken.
// The wanted parts are undefined then; the parts that ranks have do not change. Collective.
func (t *Transfer) Run() error {
	if t == nil || t.peers == nil {
		return errors.New("checkpoint: transfer: no transfer given")
	}
	if t.closed {
		return errors.New("checkpoint: transfer: it was closed")
	}
	if err := route.GroupOf(t.peers.group).Check("transfer"); err != nil {
		return err
	}
	if err := t.run(); err != nil { // the other ranks wait
		return route.GroupOf(t.peers.group).Fail(fmt.Errorf("checkpoint: transfer: %w", err))
	}
	return nil
}

func (t *Transfer) run() error {
	for _, l := range t.locals {
		if err := t.graphs.Add(gpu.StreamOf(l.stream)); err != nil {
			return err
		}
		for _, parts := range []map[string]*Part{l.src, l.dst} {
			for _, p := range parts {
				if err := p.Data.RecordStream(l.stream); err != nil {
					return fmt.Errorf("tensor %q: %w", p.Name, err)
				}
			}
		}
	}
	for _, works := range t.rounds {
		for i, l := range t.locals {
			if err := tensor.CopyAll(l.stream, works[i].packTo, works[i].packFrom); err != nil {
				return err
			}
		}
		if err := t.send(works); err != nil {
			return err
		}
		for i, l := range t.locals {
			if err := tensor.CopyAll(l.stream, works[i].unpackTo, works[i].unpackFrom); err != nil {
				return err
			}
		}
	}
	return nil
}

// send enqueues the messages of a round as one operation.
func (t *Transfer) send(works []transferWork) error {
	if !slices.ContainsFunc(works, func(w transferWork) bool { return len(w.messages) > 0 }) {
		return nil
	}
	return nccl.Group(func(b *nccl.Batch) error {
		for i, l := range t.locals {
			for _, m := range works[i].messages {
				do := nccl.Recv[byte]
				if m.sends {
					do = nccl.Send[byte]
				}
				if err := do(b.On(l.comm), l.stream, m.mem, m.peer); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Close frees the scratch memory once pending work has finished on the group's streams. While a graph that has captured Run is
// open, Close fails and the Transfer stays open. It is idempotent and safe on nil.
func (t *Transfer) Close() error {
	if t == nil || t.closed {
		return nil
	}
	if err := t.graphs.Refuse("checkpoint: close a transfer"); err != nil {
		return err
	}
	t.closed = true
	var errs []error
	for _, l := range t.locals {
		errs = append(errs, l.scratch.Close())
	}
	return errors.Join(errs...)
}
