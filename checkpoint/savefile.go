package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"path/filepath"
	"sync"
)

// A fileWriter writes the file of one rank, and computes digests on the way.
type fileWriter struct {
	job     *saveJob
	s       *snapshotter
	path    string
	out     savingFile
	digests map[string][]string // by key: of the blocks

	mu  sync.Mutex
	err error // the first one
}

// fileWorkers is how many goroutines hash and write the runs of one file.
const fileWorkers = 4

// A span is bytes of a run that are in one chunk.
type span struct {
	chunk *chunk
	off   int64 // in the file
	data  []byte
}

// writeFile writes what the snapshot brings. After an error it still gives the chunks back.
func (v *Saver) writeFile(job *saveJob, s *snapshotter) error {
	if s.file < 0 {
		return nil
	}
	w := &fileWriter{job: job, s: s, path: filepath.Join(job.temp, s.name), digests: s.newDigests()}
	w.fail(w.create(v.fs))
	runs := make(chan chan span)
	var workers sync.WaitGroup
	for range fileWorkers {
		workers.Go(func() {
			for r := range runs {
				w.run(r)
			}
		})
	}
	w.fail(w.divide(runs))
	close(runs)
	workers.Wait()
	return w.end(v.fs)
}

// create makes the file, with room for all its bytes, and writes the first ones.
func (w *fileWriter) create(fs fileSystem) error {
	if err := w.job.makeTemp(fs); err != nil {
		return err
	}
	out, err := fs.Create(w.path)
	if err != nil {
		return err
	}
	w.out = out
	if err := out.Reserve(w.s.size); err != nil {
		return err
	}
	return w.write(w.s.start, 0)
}

// divide divides the bytes of the snapshot into runs until the snapshot ends, and returns its
// error. A worker takes a whole run, because the digest of a block needs its bytes in order.
func (w *fileWriter) divide(runs chan<- chan span) error {
	var run chan span
	off, ends := int64(len(w.s.start)), w.s.runs
	for {
		f := <-w.s.filled
		if f.end {
			if run != nil { // the snapshot failed
				close(run)
			}
			return f.err
		}
		w.fail(f.chunk.copied.Sync(context.Background()))
		f.chunk.users.Store(1)
		for data := f.chunk.mem.Data()[:f.size]; len(data) > 0; {
			if run == nil {
				run = make(chan span, 1)
				runs <- run
			}
			n := min(int64(len(data)), ends[0]-off)
			f.chunk.users.Add(1)
			run <- span{f.chunk, off, data[:n]}
			data, off = data[n:], off+n
			if off == ends[0] {
				close(run)
				run, ends = nil, ends[1:]
			}
		}
		w.s.leave(f.chunk)
	}
}

// run writes and hashes a run.
func (w *fileWriter) run(spans <-chan span) {
	var b blockSum
	for x := range spans {
		if w.failed() == nil {
			w.fail(w.write(x.data, x.off))
			b.add(w, x.data, x.off)
		}
		w.s.leave(x.chunk)
	}
}

// A blockSum computes the digests of the blocks of a run.
type blockSum struct {
	sum  hash.Hash
	left int64   // bytes of the block that are not in sum
	to   *string // its digest
}

// add adds the bytes at an offset of the file.
func (b *blockSum) add(w *fileWriter, data []byte, off int64) {
	for len(data) > 0 {
		if b.left == 0 {
			p := &w.s.pieces[w.s.pieceAt(off)]
			at := off - p.off
			b.sum, b.left = sha256.New(), min(blockBytes, int64(p.mem.Len())-at)
			b.to = &w.digests[p.part.Key][at/blockBytes]
		}
		n := min(b.left, int64(len(data)))
		b.sum.Write(data[:n])
		data, off, b.left = data[n:], off+n, b.left-n
		if b.left == 0 {
			*b.to = hex.EncodeToString(b.sum.Sum(nil))
		}
	}
}

// write writes bytes at an offset of the file. The error names the tensor.
func (w *fileWriter) write(data []byte, off int64) error {
	n, err := w.out.WriteAt(data, off)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	n = max(n, 0)
	w.job.moved.Add(int64(n))
	if err != nil {
		at := off + int64(n)
		return &TensorError{Op: "save", Path: w.path, Tensor: w.s.tensorAt(at), Offset: at, Err: err}
	}
	return nil
}

// fail keeps the first error.
func (w *fileWriter) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

func (w *fileWriter) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// end brings the file to the disk, and tells rank 0.
func (w *fileWriter) end(fs fileSystem) error {
	err := w.err
	if w.out != nil {
		if err == nil {
			err = w.out.Sync()
		}
		err = errors.Join(err, w.out.Close())
	}
	if err != nil {
		return err
	}
	r := rankReport{Digests: w.digests, Value: w.job.values[w.s.local], Header: digest(w.s.start)}
	return writeReport(fs, w.job.temp, w.s.rank, &r)
}

// A rankReport is the message of a rank that has written its file.
type rankReport struct {
	Digests map[string][]string // by key: of the blocks
	Header  string
	Value   json.RawMessage
	Error   string // why the rank failed
}

// reportName is the file of a rank's message.
func reportName(rank int) string { return fmt.Sprintf("rank-%05d.done", rank) }

// writeReport makes the message visible at once.
func writeReport(fs fileSystem, temp string, rank int, r *rankReport) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := filepath.Join(temp, reportName(rank))
	if err := writeWhole(fs, path+".new", text); err != nil {
		return err
	}
	return fs.Rename(path+".new", path)
}
