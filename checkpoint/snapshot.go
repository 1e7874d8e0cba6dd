package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"sort"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A snapshotter copies what a local rank writes to pinned host memory.
type snapshotter struct {
	rank   int
	local  int            // of the local ranks
	side   *stream.Stream // of the copies
	file   int            // in the manifest
	name   string         // of the file; empty if the rank writes none
	start  []byte         // the first bytes of the file
	pieces []snapshotPiece
	runs   []fileRun
	size   int64 // of the file

	slots  []*slot      // run i uses slot i modulo their number
	filled chan filling // to the writer of the file
	ended  *stream.Event
}

// A snapshotPiece is a part that the rank writes.
type snapshotPiece struct {
	part *savedPart
	name string // of the whole tensor
	off  int64  // in the file
	data tensor.Tensor
	mem  memory.Slice[byte]
}

// A fileRun is the bytes of a file that are copied, hashed and written at once: whole blocks.
type fileRun struct{ begin, end int64 }

// A slot is pinned memory for a run.
type slot struct {
	mem    *memory.Pinned[byte]
	copied *stream.Event
	free   chan struct{} // has a value while the slot is free
}

// A filling is a run on its way to the file, or the end of a snapshot with its error.
type filling struct {
	slot *slot
	run  fileRun
	end  bool
	err  error
}

func newSnapshotter(local int, l *local, m *manifest, headers []*safetensors.Header, starts [][]byte, parts []Part, most int64) (*snapshotter, error) {
	s := &snapshotter{rank: l.rank, local: local, file: -1}
	for i, f := range m.Files {
		if f.rank == l.rank {
			s.file, s.name, s.start, s.size = i, f.Name, starts[i], f.Bytes
		}
	}
	var err error
	if s.side, err = stream.New(l.device(), nil); err != nil {
		return s, err
	}
	if s.ended, err = stream.NewEvent(l.device(), nil); err != nil || s.file < 0 {
		return s, err
	}
	mine := map[string]tensor.Tensor{}
	for _, p := range parts {
		mine[p.Name] = p.Data
	}
	byKey := map[string]snapshotPiece{}
	for i := range m.Tensors {
		for j := range m.Tensors[i].Parts {
			if p := &m.Tensors[i].Parts[j]; p.rank == l.rank {
				byKey[p.Key] = snapshotPiece{part: p, name: m.Tensors[i].Name, data: mine[m.Tensors[i].Name]}
			}
		}
	}
	for _, t := range headers[s.file].Tensors {
		p := byKey[t.Name]
		p.off = t.Begin
		if t.Bytes() > 0 {
			if p.mem, err = bytesOf(p.data); err != nil {
				return s, err
			}
		}
		s.pieces = append(s.pieces, p)
	}
	s.divide()
	return s, s.allocate(l, most)
}

// divide divides the file into runs of whole blocks, which have at most blockBytes.
func (s *snapshotter) divide() {
	begin := int64(len(s.start))
	for _, p := range s.pieces {
		end := p.off + int64(p.mem.Len())
		for at := p.off; at < end; {
			next := min(at+blockBytes, end)
			if at > begin && next-begin > blockBytes {
				s.runs, begin = append(s.runs, fileRun{begin, at}), at
			}
			at = next
		}
	}
	if begin < s.size {
		s.runs = append(s.runs, fileRun{begin, s.size})
	}
}

// pieceAt returns the number of the piece at an offset of the file.
func (s *snapshotter) pieceAt(off int64) int {
	return sort.Search(len(s.pieces), func(i int) bool { return off < s.pieces[i].off+int64(s.pieces[i].mem.Len()) })
}

// tensorAt returns the name of the tensor at an offset of the file.
func (s *snapshotter) tensorAt(off int64) string {
	if i := s.pieceAt(off); i < len(s.pieces) {
		return s.pieces[i].name
	}
	return "(after the last)"
}

// newDigests returns room for a digest of each block, by key.
func (s *snapshotter) newDigests() map[string][]string {
	all := map[string][]string{}
	for _, p := range s.pieces {
		if p.mem.Len() == 0 {
			all[p.part.Key] = []string{digest(nil)}
			continue
		}
		all[p.part.Key] = make([]string, (int64(p.mem.Len())+blockBytes-1)/blockBytes)
	}
	return all
}

// allocate allocates a slot for each run, or, if most is not 0, as many as have most bytes, and
// at least one.
func (s *snapshotter) allocate(l *local, most int64) error {
	largest := int64(1)
	for _, r := range s.runs {
		largest = max(largest, r.end-r.begin)
	}
	n := len(s.runs)
	if most > 0 {
		n = min(n, int(max(most/largest, 1)))
	}
	sizes := make([]int64, n)
	for i, r := range s.runs {
		sizes[i%n] = max(sizes[i%n], r.end-r.begin)
	}
	s.filled = make(chan filling, n+1)
	for _, size := range sizes {
		x := &slot{free: make(chan struct{}, 1)}
		s.slots = append(s.slots, x)
		var err error
		if x.mem, err = memory.MakePinned[byte](l.device(), int(size)); err != nil {
			return fmt.Errorf("%d bytes of pinned memory for snapshots of rank %d: %w", size, s.rank, err)
		}
		if x.copied, err = stream.NewEvent(l.device(), nil); err != nil {
			return err
		}
		x.free <- struct{}{}
	}
	return nil
}

func (s *snapshotter) check(on *stream.Stream) error {
	if err := gpu.CheckStream("checkpoint", on, nil); err != nil {
		return err
	}
	if on.Device() != s.side.Device() {
		return fmt.Errorf("the stream of rank %d is of %s: want one of %s", s.rank, on.Device(), s.side.Device())
	}
	return gpu.StreamOf(on).RefuseWait("checkpoint")
}

// snapshot enqueues the copies behind the work on a stream, and lets the stream wait for them.
// The writer of the file hears of its end in any case.
func (s *snapshotter) snapshot(ctx context.Context, on *stream.Stream) error {
	if s.file < 0 {
		return nil
	}
	err := s.side.WaitStream(on)
	if err == nil {
		err = s.copy(ctx)
	}
	if err == nil {
		err = s.ended.Record(s.side)
	}
	if err == nil {
		err = on.Wait(s.ended)
	}
	s.filled <- filling{end: true, err: err}
	return err
}

// copy enqueues the copies, run after run.
func (s *snapshotter) copy(ctx context.Context) error {
	for _, p := range s.pieces {
		if p.mem.Len() > 0 {
			if err := p.mem.RecordStream(s.side); err != nil {
				return err
			}
		}
	}
	for i, r := range s.runs {
		x := s.slots[i%len(s.slots)]
		select {
		case <-x.free:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := s.fill(x, r); err != nil {
			x.free <- struct{}{} // for the next snapshot
			return err
		}
		s.filled <- filling{slot: x, run: r}
	}
	return nil
}

// fill enqueues the copies of a run.
func (s *snapshotter) fill(x *slot, r fileRun) error {
	for off := r.begin; off < r.end; {
		p := &s.pieces[s.pieceAt(off)]
		from, at := int(off-p.off), int(off-r.begin)
		n := min(int(r.end-off), p.mem.Len()-from)
		if err := p.mem.Slice(from, from+n).CopyToPinned(s.side, x.mem.Slice(at, at+n)); err != nil {
			return fmt.Errorf("snapshot of tensor %q: %w", p.name, err)
		}
		off += int64(n)
	}
	return x.copied.Record(s.side)
}

func (s *snapshotter) close() error {
	errs := []error{s.side.Close(), s.ended.Close()}
	for _, x := range s.slots {
		errs = append(errs, x.copied.Close())
		if x.mem != nil {
			errs = append(errs, x.mem.Close())
		}
	}
	return errors.Join(errs...)
}
