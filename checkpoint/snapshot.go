package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"sync/atomic"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// chunkBytes is the size of a piece of pinned memory. Tests change it.
var chunkBytes = int64(64 << 20)

// A snapshotter copies what a local rank writes to pinned host memory.
type snapshotter struct {
	rank   int
	local  int            // of the local ranks
	side   *stream.Stream // of the copies
	file   int            // in the manifest
	name   string         // of the file; empty if the rank writes none
	start  []byte         // the first bytes of the file
	pieces []snapshotPiece
	runs   []int64 // the end of each run of whole blocks in the file
	size   int64   // of the file

	chunks []*chunk
	free   chan *chunk
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

// A chunk is pinned memory of a snapshot.
type chunk struct {
	mem    *memory.Pinned[byte]
	copied *stream.Event
	users  atomic.Int32 // goroutines that still read it
}

// A filling is a chunk on its way to the file, or the end of a snapshot with its error.
type filling struct {
	chunk *chunk
	size  int
	end   bool
	err   error
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

// divide divides the file into runs of at most blockBytes.
func (s *snapshotter) divide() {
	begin := int64(len(s.start))
	for _, p := range s.pieces {
		end := p.off + int64(p.mem.Len())
		for at := p.off; at < end; {
			next := min(at+blockBytes, end)
			if at > begin && next-begin > blockBytes {
				s.runs, begin = append(s.runs, at), at
			}
			at = next
		}
	}
	s.runs = append(s.runs, s.size)
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

// leave lets the snapshot use a chunk again if this was the last goroutine that reads it.
func (s *snapshotter) leave(c *chunk) {
	if c.users.Add(-1) == 0 {
		s.free <- c
	}
}

// allocate allocates chunks for the whole snapshot, or of at most most bytes. 0 means unlimited.
func (s *snapshotter) allocate(l *local, most int64) error {
	total := s.size - int64(len(s.start))
	size := chunkBytes
	if most == 0 || most > total {
		most = total
	}
	if most < total {
		size = min(size, max(most/2, 1))
	}
	n := max((most+size-1)/size, 1)
	s.free, s.filled = make(chan *chunk, n), make(chan filling, n+1)
	for i := range n {
		c := &chunk{}
		s.chunks = append(s.chunks, c)
		var err error
		if c.mem, err = memory.MakePinned[byte](l.device(), int(max(min(size, most-i*size), 1))); err != nil {
			return fmt.Errorf("%d bytes of pinned memory for snapshots of rank %d: %w", most, s.rank, err)
		}
		if c.copied, err = stream.NewEvent(l.device(), nil); err != nil {
			return err
		}
		s.free <- c
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

// copy enqueues the copies, chunk after chunk.
func (s *snapshotter) copy(ctx context.Context) error {
	var c *chunk // being filled
	defer func() {
		if c != nil { // after an error, so that the next snapshot has it
			s.free <- c
		}
	}()
	at := 0
	flush := func() error {
		if c == nil {
			return nil
		}
		if err := c.copied.Record(s.side); err != nil {
			return err
		}
		s.filled <- filling{chunk: c, size: at}
		c, at = nil, 0
		return nil
	}
	for _, p := range s.pieces {
		if p.mem.Len() == 0 {
			continue
		}
		if err := p.mem.RecordStream(s.side); err != nil {
			return err
		}
		for from := 0; from < p.mem.Len(); {
			if c == nil {
				select {
				case c = <-s.free:
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
			n := min(c.mem.Len()-at, p.mem.Len()-from)
			if err := p.mem.Slice(from, from+n).CopyToPinned(s.side, c.mem.Slice(at, at+n)); err != nil {
				return fmt.Errorf("snapshot of tensor %q: %w", p.name, err)
			}
			from, at = from+n, at+n
			if at == c.mem.Len() {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	return flush()
}

func (s *snapshotter) close() error {
	errs := []error{s.side.Close(), s.ended.Close()}
	for _, c := range s.chunks {
		errs = append(errs, c.copied.Close())
		if c.mem != nil {
			errs = append(errs, c.mem.Close())
		}
	}
	return errors.Join(errs...)
}
