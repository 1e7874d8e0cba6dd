package checkpoint

import "github.com/gochorus/chorus/internal/files"

const (
	// smallTensor is the largest size in the file of a batched tensor. The parts of larger
	// tensors are further apart than the gaps that a read covers.
	smallTensor = 2 * files.GapBytes
	// mostBatch is the size of a batch, large enough for an efficient read.
	mostBatch = 4 << 20
	// batchAlign is the alignment of tensors in a batch. It fits every element, and most
	// files, whose tensors then need one copy.
	batchAlign = 8
)

// A batch is small tensors that one rank reads for all. Each rank copies its parts from its
// staging buffer.
type batch struct {
	tensors []*placed
	bytes   int
}

func (s *scheduler) addSmall(t *placed) {
	if one := (batch{tensors: []*placed{t}}); len(one.needers(s.ranks)) == 0 {
		return
	}
	if s.small.bytes+t.fileBytes() > min(mostBatch, s.budget) {
		s.flushBatch()
	}
	s.small.tensors = append(s.small.tensors, t)
	s.small.bytes += roundUp(t.fileBytes(), batchAlign)
}

// flushBatch lets the rank with the least work read the batch, sends the batch to the other
// ranks that need a part, and cuts the parts out.
func (s *scheduler) flushBatch() {
	b := s.small
	s.small = batch{}
	who := b.needers(s.ranks)
	if len(who) == 0 {
		return
	}
	s.room(who)
	reader := who[0]
	for _, rank := range who {
		if s.reads(rank) < s.reads(reader) {
			reader = rank
		}
	}
	at := make([]int, s.ranks)
	for _, rank := range who {
		at[rank] = s.open.ranks[rank].stage(b.bytes)
		s.load[rank] += b.bytes // it is in the staging buffers of all these ranks
	}
	for _, rank := range who {
		if rank != reader {
			s.open.sends = append(s.open.sends, send{from: reader, to: rank, packed: true, batch: true, fromAt: at[reader], toAt: at[rank], bytes: b.bytes})
		}
	}
	place := 0
	for _, t := range b.tensors {
		w := &s.open.ranks[reader]
		if t.fileBytes() > 0 {
			w.reads = append(w.reads, read{file: t.file, off: t.off, size: t.fileBytes(), staged: true, at: at[reader] + place})
		}
		for _, rank := range who {
			if g := t.flat.ranges[rank]; t.flat.outer*g.Len > 0 {
				s.open.ranks[rank].parts = append(s.open.ranks[rank].parts, copying{of: t, rows: t.flat.outer, width: t.flat.width, from: g, staged: at[rank] + place, at: t.at[rank]})
			}
		}
		place += roundUp(t.fileBytes(), batchAlign)
	}
}

// reads is how many bytes a rank reads in the open round.
func (s *scheduler) reads(rank int) int64 { return s.open.ranks[rank].reads.bytes() }

// needers returns the ranks that get a part of the batch.
func (b *batch) needers(ranks int) []int {
	var who []int
	for rank := range ranks {
		for _, t := range b.tensors {
			if t.flat.outer*t.flat.ranges[rank].Len > 0 {
				who = append(who, rank)
				break
			}
		}
	}
	return who
}
