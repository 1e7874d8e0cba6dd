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
)

// A fileWriter writes the file of one rank, and computes digests on the way.
type fileWriter struct {
	job  *saveJob
	s    *snapshotter
	path string
	out  savingFile
	off  int64
	next int       // piece
	left int64     // bytes of the piece before it
	sum  hash.Hash // of that piece

	digests map[string]string // by key
}

// writeFile writes what the snapshot brings. After an error it still gives the chunks back.
func (v *Saver) writeFile(job *saveJob, s *snapshotter) error {
	if s.file < 0 {
		return nil
	}
	w := &fileWriter{job: job, s: s, path: filepath.Join(job.temp, s.name), digests: map[string]string{}}
	err := v.fs.MkdirAll(job.temp)
	if err == nil {
		var out savingFile
		if out, err = v.fs.Create(w.path); err == nil {
			w.out = out
			err = w.write(s.start)
		}
	}
	for {
		f := <-s.filled
		if f.end {
			err = errors.Join(err, f.err)
			break
		}
		if e := f.chunk.copied.Sync(context.Background()); err == nil {
			err = e
		}
		if err == nil {
			err = w.chunk(f.chunk.mem.Data()[:f.size])
		}
		s.free <- f.chunk
	}
	return w.end(v.fs, err)
}

// chunk hashes and writes bytes of tensors.
func (w *fileWriter) chunk(data []byte) error {
	hashed := make(chan struct{})
	go func() { w.hash(data); close(hashed) }()
	err := w.write(data)
	<-hashed
	return err
}

// hash adds bytes to the digests of their pieces.
func (w *fileWriter) hash(data []byte) {
	for len(data) > 0 {
		if w.left == 0 {
			w.sum, w.left = sha256.New(), int64(w.s.pieces[w.next].mem.Len())
			w.next++
			if w.left == 0 {
				continue
			}
		}
		n := min(w.left, int64(len(data)))
		w.sum.Write(data[:n])
		data, w.left = data[n:], w.left-n
		if w.left == 0 {
			w.digests[w.s.pieces[w.next-1].part.Key] = hex.EncodeToString(w.sum.Sum(nil))
		}
	}
}

// write writes bytes at the end of the file. The error names the tensor.
func (w *fileWriter) write(data []byte) error {
	n, err := w.out.Write(data)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	at := w.off + int64(max(n, 0))
	w.off += int64(len(data))
	w.job.moved.Add(int64(max(n, 0)))
	if err != nil {
		return &TensorError{Op: "save", Path: w.path, Tensor: w.s.tensorAt(at), Offset: at, Err: err}
	}
	return nil
}

// tensorAt returns the name of the tensor at an offset of the file.
func (s *snapshotter) tensorAt(off int64) string {
	for _, p := range s.pieces {
		if off < p.off+int64(p.mem.Len()) {
			return p.name
		}
	}
	return "(after the last)"
}

// end brings the file to the disk.
func (w *fileWriter) end(fs fileSystem, err error) error {
	if w.out != nil {
		if err == nil {
			err = w.out.Sync()
		}
		err = errors.Join(err, w.out.Close())
	}
	if err != nil {
		return err
	}
	for _, p := range w.s.pieces {
		if p.mem.Len() == 0 {
			w.digests[p.part.Key] = digest(nil)
		}
	}
	r := rankReport{Digests: w.digests, Value: w.job.values[w.s.local], Header: digest(w.s.start)}
	return writeReport(fs, w.job.temp, w.s.rank, &r)
}

// A rankReport is the message of a rank that has written its file.
type rankReport struct {
	Digests map[string]string // by key
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
