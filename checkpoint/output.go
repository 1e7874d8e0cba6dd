package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
)

const (
	extension      = ".safetensors"
	indexExtension = ".index.json" // behind the name of a checkpoint of one file
)

// An output is the files of a checkpoint that is being written. They have other names until
// commit.
type output struct {
	path    string
	cfg     *SaveConfig
	shards  []safetensors.Shard
	headers []*safetensors.Header
	starts  [][]byte // the first bytes of each file
	files   []*gds.File
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
		return nil, fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	for _, s := range o.shards {
		h, start, err := safetensors.NewHeader(s.Tensors, cfg.Metadata)
		if err != nil {
			return nil, fmt.Errorf("checkpoint: save %s: %w", path, err)
		}
		o.headers, o.starts = append(o.headers, h), append(o.starts, start)
	}
	return o, nil
}

// file returns the path of a file.
func (o *output) file(i int) string { return filepath.Join(filepath.Dir(o.path), o.shards[i].File) }

// open makes the files.
func (o *output) open() error {
	for i := range o.shards {
		f, err := gds.Create(o.file(i), o.cfg.File)
		if err != nil {
			return err
		}
		o.files = append(o.files, f)
	}
	return nil
}

// create makes the files, with their headers, and reserves their room.
func (o *output) create() error {
	if err := o.open(); err != nil {
		return err
	}
	for i, f := range o.files {
		if err := files.Of(f).Begin(o.starts[i], o.headers[i].Size); err != nil {
			return err
		}
	}
	return nil
}

// commit lets the files replace the old ones, and then the index. If there is one file, an
// index of that name belongs to an older checkpoint, and Open would read it first.
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
		return fmt.Errorf("checkpoint: save %s: remove the index of an older checkpoint: %w", o.path, err)
	}
	return nil
}

func (o *output) writeIndex(ctx context.Context) error {
	x, err := safetensors.NewIndex(o.shards)
	if err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", o.path, err)
	}
	f, err := gds.Create(o.path+indexExtension, o.cfg.File)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := files.Of(f).WriteHost(x.Write); err != nil {
		return err
	}
	return f.Commit(ctx)
}

// close closes the files, and removes those that were not committed.
func (o *output) close() error {
	if o == nil {
		return nil
	}
	return closeAll(o.files)
}
