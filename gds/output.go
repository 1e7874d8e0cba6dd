package gds

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/gochorus/chorus/gds/safetensors"
)

const (
	extension      = ".safetensors"
	indexExtension = ".index.json" // behind the name of a checkpoint of one file
)

// An output is the files of a checkpoint that is written. They have other names until
// commit.
type output struct {
	path    string
	cfg     *SaveConfig
	shards  []safetensors.Shard
	headers []*safetensors.Header
	starts  [][]byte // what each file begins with
	files   []*File
}

// newOutput divides tensors into files.
func newOutput(path string, infos []safetensors.Tensor, cfg *SaveConfig) (*output, error) {
	o := &output{path: path, cfg: cfg}
	most := cfg.MaxFileBytes
	if most == 0 {
		most = math.MaxInt64
	}
	var err error
	if o.shards, err = safetensors.Split(strings.TrimSuffix(filepath.Base(path), extension), infos, most); err != nil {
		return nil, fmt.Errorf("gds: save %s: %w", path, err)
	}
	for _, s := range o.shards {
		h, start, err := safetensors.NewHeader(s.Tensors, cfg.Metadata)
		if err != nil {
			return nil, fmt.Errorf("gds: save %s: %w", path, err)
		}
		o.headers, o.starts = append(o.headers, h), append(o.starts, start)
	}
	return o, nil
}

// file returns the path of a file.
func (o *output) file(i int) string { return filepath.Join(filepath.Dir(o.path), o.shards[i].File) }

// create makes the files, with their headers and the room for all of them.
func (o *output) create() error {
	for i := range o.shards {
		f, err := Create(o.file(i), o.cfg.File)
		if err != nil {
			return err
		}
		o.files = append(o.files, f)
		if err := f.begin(o.starts[i], o.headers[i].Size); err != nil {
			return err
		}
	}
	return nil
}

// begin gives a new file its length, with the room for it, and writes its first bytes.
func (f *File) begin(start []byte, size int64) error {
	if err := f.reserve(size); err != nil {
		return err
	}
	if _, err := f.plain.WriteAt(start, 0); err != nil {
		return f.fail("write", errors.Unwrap(err))
	}
	if err := f.plain.Truncate(size); err != nil {
		return f.fail("extend", errors.Unwrap(err))
	}
	return nil
}

// commit lets the files take their places, and then the index. Where there is one file
// only, an index of that name is of an older checkpoint, and would be found first.
func (o *output) commit(ctx context.Context) error {
	for _, f := range o.files {
		if err := f.Commit(ctx); err != nil {
			return err
		}
	}
	if len(o.shards) > 1 {
		return o.writeIndex(ctx)
	}
	if err := os.Remove(o.path + indexExtension); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("gds: save %s: remove the index of an older checkpoint: %w", o.path, err)
	}
	return nil
}

func (o *output) writeIndex(ctx context.Context) error {
	x, err := safetensors.NewIndex(o.shards)
	if err != nil {
		return fmt.Errorf("gds: save %s: %w", o.path, err)
	}
	f, err := Create(o.path+indexExtension, o.cfg.File)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := x.Write(f.plain); err != nil {
		return f.fail("write", err)
	}
	return f.Commit(ctx)
}

// close closes what is open; files that were not committed are gone then.
func (o *output) close() error {
	if o == nil {
		return nil
	}
	var errs []error
	for _, f := range o.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
