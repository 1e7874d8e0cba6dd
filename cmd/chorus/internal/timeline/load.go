package timeline

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/internal/timeline"
)

const (
	mostFiles   = 1 << 16
	mostRecords = 1 << 25 // of all files
	mostLine    = 1 << 22
	format      = 1
)

// A file is the content of one file.
type file struct {
	name    string
	header  timeline.Header
	records []timeline.Record
	cut     bool // the process ended while it wrote
}

// Load reads all files of a directory.
func Load(dir string) (*Job, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("timeline: %w", err)
	}
	var files []*file
	left := mostRecords
	for _, e := range entries {
		if !e.Type().IsRegular() || !strings.HasPrefix(e.Name(), "timeline-") || filepath.Ext(e.Name()) != ".jsonl" {
			continue
		}
		if len(files) == mostFiles {
			return nil, fmt.Errorf("timeline: %s has more than %d files", plain.Text(dir), mostFiles)
		}
		f, err := loadFile(filepath.Join(dir, e.Name()), left)
		if err != nil {
			return nil, fmt.Errorf("timeline: %s: %w", plain.Text(e.Name()), err)
		}
		left -= len(f.records)
		files = append(files, f)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("timeline: %s has no files of a timeline: set CHORUS_TIMELINE=%[1]s for the job, or call timeline.Start", plain.Text(dir))
	}
	return newJob(files), nil
}

func loadFile(path string, most int) (*file, error) {
	r, err := safefile.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	f := &file{name: filepath.Base(path)}
	return f, f.read(r, most)
}

// read reads a header and at most that many records. An incomplete last line is ignored, because
// a process may be killed while it writes.
func (f *file) read(r io.Reader, most int) error {
	b := bufio.NewReaderSize(r, 1<<16)
	for n := 1; ; n++ {
		line, err := readLine(b)
		if errors.Is(err, io.EOF) {
			f.cut = len(line) > 0
			if n == 1 {
				return errors.New("the file has no header: it is empty, or the process ended while it wrote the header")
			}
			return nil
		}
		if err == nil {
			err = f.add(line, n == 1)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if len(f.records) > most {
			return fmt.Errorf("the directory has more than %d records: record fewer steps with timeline.Start", mostRecords)
		}
	}
}

// readLine returns the next line. With io.EOF it is incomplete.
func readLine(b *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := b.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte("\n")), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return line, err
		case len(line) > mostLine:
			return nil, fmt.Errorf("more than %d bytes", mostLine)
		}
	}
}

func (f *file) add(line []byte, first bool) error {
	if first {
		if err := json.Unmarshal(line, &f.header); err != nil {
			return err
		}
		plain.Record(&f.header)
		if f.header.Format != format {
			return fmt.Errorf("the file has the format %d: this chorus reads %d", f.header.Format, format)
		}
		if origin := origin(&f.header); origin < 0 || origin > mostOrigin {
			return fmt.Errorf("an origin at %d ns", origin)
		}
		return nil
	}
	var x timeline.Record
	if err := json.Unmarshal(line, &x); err != nil {
		return err
	}
	plain.Record(&x)
	if err := check(&x); err != nil {
		return err
	}
	f.records = append(f.records, x)
	return nil
}

// These limits prevent overflows when times, origins and offsets between hosts are added.
const (
	mostTime   = 1 << 58 // of a record since its origin: nine years
	mostOrigin = 1 << 61 // the year 2043 on the wall clock
)

// origin returns the origin of a process: on the clock of its host, or the wall clock if the host is
// not known.
func origin(h *timeline.Header) int64 {
	if h.Boot == "" {
		return h.Wall
	}
	return h.Monotonic
}

func check(x *timeline.Record) error {
	switch {
	case x.Begin < -mostTime || x.Begin > mostTime || x.End < -mostTime || x.End > mostTime:
		return fmt.Errorf("a record from %d to %d ns", x.Begin, x.End)
	case x.Device < timeline.NoDevice:
		return fmt.Errorf("a record of the device %d", x.Device)
	case x.Kind == timeline.Member && x.Member == nil, x.Kind == timeline.Collective && x.Device < 0:
		return fmt.Errorf("an incomplete record of the kind %s", x.Kind)
	case x.Member != nil && (x.Member.Rank < 0 || x.Member.Size < 1 || slices.Min(append(x.Member.World, 0)) < 0):
		return fmt.Errorf("rank %d of %d", x.Member.Rank, x.Member.Size)
	}
	return nil
}
