package analyze

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/internal/safefile"
)

// mostFiles limits the files of a job; a rank writes one for each communicator that fails.
const mostFiles = 1 << 16

// A File is a file that was read, or could not be read.
type File struct {
	Name  string `json:"file"`
	From  string `json:"from"` // "chorus", "torch" or "ras"
	Error string `json:"error,omitempty"`
}

// Load reads the dumps of all ranks. It reads all files of a folder, but not of folders in it.
// A file that cannot be read is a finding, not an error.
func Load(paths []string) (*Job, error) {
	names, err := list(paths)
	if err != nil {
		return nil, err
	}
	j := newJob()
	for _, name := range names {
		f := File{Name: plain.Text(name), From: "chorus"}
		d, err := loadFile(name)
		if err == nil {
			switch {
			case d.service != nil:
				f.From = "ras"
			case !d.fromChorus():
				f.From = "torch"
			}
			err = j.add(d)
		}
		if err != nil {
			f.Error, f.From = plain.Text(err.Error()), ""
		}
		j.files = append(j.files, f)
	}
	return j, nil
}

// Live returns a job without files, for the dumps of ranks that run. The dumps also have groups
// with other ranks, which were not asked for a dump.
func Live(asked []int) *Job {
	j := newJob()
	j.live, j.asked = true, asked
	return j
}

// Add adds the dump of a rank that runs.
func (j *Job) Add(r io.Reader) error {
	d, err := decode(r)
	if err == nil {
		err = j.add(d)
	}
	return err
}

func loadFile(name string) (*dump, error) {
	f, err := safefile.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := decode(f)
	if err == nil {
		d.file = name
	}
	return d, err
}

// list returns the files of paths, sorted.
func list(paths []string) (names []string, err error) {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("analyze: %w", err)
		}
		if !info.IsDir() {
			names = append(names, path)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, fmt.Errorf("analyze: %w", err)
		}
		for _, e := range entries {
			if e.Type()&fs.ModeDir == 0 {
				names = append(names, filepath.Join(path, e.Name()))
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return nil, errors.New("analyze: the folders have no files: give the files of CHORUS_NCCL_TRACE_FILE or TORCH_FR_DUMP_TEMP_FILE")
	case len(names) > mostFiles:
		return nil, fmt.Errorf("analyze: %d files: want at most %d", len(names), mostFiles)
	}
	return names, nil
}
