package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/internal/torchfile"
	"github.com/gochorus/chorus/memory"
)

// A Checkpoint is the tensors of one or more files. Load and LoadOn may read them any number of
// times, also by several goroutines and several groups at once.
type Checkpoint struct {
	files     []*gds.File
	headers   []*safetensors.Header
	infos     []Info // in the order of the files
	where     map[string]place
	scattered map[string]*scattered // tensors that are not one run of a file
	metadata  map[string]string
}

// A place is the position of a tensor in the files.
type place struct{ file, tensor int }

// Open opens a checkpoint: safetensors files, files of torch.save, an index of several files
// (model.safetensors.index.json, pytorch_model.bin.index.json), a folder that has one of them,
// or a folder that a Saver or torch.distributed.checkpoint wrote. If an index names the files,
// only tensors that it names belong to the checkpoint.
//
// Open reads all headers and checks them by all rules of the format. An error names the file,
// the tensor and the byte. cfg are the options of the files; nil are their defaults.
//
// Files of torch.save have the format of PyTorch 1.6 and later. Open does not run code: it
// knows the classes of tensors, dictionaries and plain values, and any other class or function
// is an error that names it. Keys and indices on the way to a tensor, with dots between, are its
// name; a tensor in no container has the name "tensor". Plain values, such as a learning rate,
// are in Metadata as JSON. Views may repeat elements, as Tensor.expand makes them: all tensors
// of a file have at most 64 times the bytes of the file, or 1 GiB if that is more.
//
// Views with strides, and tensors whose parts are in several files, are read by the host
// through the page cache, by each rank that needs them. All other tensors of files of
// torch.save are read like those of safetensors files.
func Open(paths []string, cfg *gds.FileConfig) (*Checkpoint, error) {
	if len(paths) == 0 {
		return nil, errors.New("checkpoint: open safetensors: no file given")
	}
	c := &Checkpoint{where: map[string]place{}}
	for _, p := range paths {
		if err := c.open(cfg, p); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// openIn is Open for files in the folder of a Saver. It follows no link out of the folder.
func openIn(folder string, names []string, cfg *gds.FileConfig) (*Checkpoint, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: open %s: %w", folder, err)
	}
	defer root.Close()
	c, cfg := &Checkpoint{where: map[string]place{}}, within(cfg, root)
	for _, name := range names {
		if _, err := c.openFile(cfg, name, nil); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// within returns a configuration for names in a folder.
func within(cfg *gds.FileConfig, root *os.Root) *gds.FileConfig {
	var c gds.FileConfig
	if cfg != nil {
		c = *cfg
	}
	files.SetFolder(&c, root)
	return &c
}

// indexName is the name of an index in transformers.
const indexName = "model.safetensors.index.json"

func (c *Checkpoint) open(cfg *gds.FileConfig, path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("checkpoint: open safetensors: %w", err)
	case info.IsDir():
		return c.openFolder(cfg, path)
	case strings.HasSuffix(path, ".json"):
		return c.openIndex(cfg, path)
	}
	_, err = c.openFile(cfg, path, nil)
	return err
}

func (c *Checkpoint) openFolder(cfg *gds.FileConfig, folder string) error {
	switch {
	case isSaved(folder):
		return c.openManifest(cfg, folder)
	case exists(filepath.Join(folder, torchfile.MetadataName)):
		return c.openDistributed(cfg, folder)
	}
	for _, pattern := range []string{indexName, "*.safetensors.index.json", "*.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"} {
		found, err := filepath.Glob(filepath.Join(escape(folder), pattern))
		if err != nil {
			return fmt.Errorf("checkpoint: open safetensors in %s: %w", folder, err)
		}
		switch {
		case len(found) == 1:
			return c.open(cfg, found[0])
		case len(found) > 1:
			return fmt.Errorf("checkpoint: open safetensors: folder %s has %d files %s and no %s: name those that belong together", folder, len(found), pattern, indexName)
		}
	}
	if steps, err := List(folder); err == nil && len(steps) > 0 {
		return fmt.Errorf("checkpoint: open: folder %s has %d steps of a training: name one of them, such as %s", folder, len(steps), steps[len(steps)-1])
	}
	return fmt.Errorf("checkpoint: open safetensors: folder %s has no checkpoint: want a safetensors file, an index, pytorch_model.bin, or a folder of a Saver or of torch.distributed.checkpoint", folder)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// escape returns a pattern that matches only the path.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// openFile opens a file. only selects the tensors that belong to the checkpoint; nil selects
// all.
func (c *Checkpoint) openFile(cfg *gds.FileConfig, path string, only func(name string) bool) (*safetensors.Header, error) {
	f, err := gds.Open(path, cfg)
	if err != nil {
		return nil, err
	}
	c.files = append(c.files, f)
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	h, err := c.readHeader(f, size, only)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: open %s: %w", f.Path(), err)
	}
	c.headers = append(c.headers, h)
	c.addMetadata(h.Metadata)
	return h, nil
}

// addMetadata adds texts with new keys.
func (c *Checkpoint) addMetadata(texts map[string]string) {
	for k, v := range texts {
		if c.metadata == nil {
			c.metadata = map[string]string{}
		}
		if _, first := c.metadata[k]; !first {
			c.metadata[k] = v
		}
	}
}

// readHeader adds the tensors of the last file.
func (c *Checkpoint) readHeader(f *gds.File, size int64, only func(name string) bool) (*safetensors.Header, error) {
	start, err := torchfile.Start(hostReader{f}, size)
	if err != nil {
		return nil, err
	}
	if torchfile.Is(start) {
		return c.addTorch(f, size, only)
	}
	h, err := safetensors.ReadHeader(hostReader{f}, size)
	if err != nil {
		return nil, err
	}
	for i := range h.Tensors {
		if only != nil && !only(h.Tensors[i].Name) {
			continue
		}
		if err := c.add(place{len(c.files) - 1, i}, &h.Tensors[i]); err != nil {
			return nil, err
		}
	}
	return h, nil
}

func (c *Checkpoint) openIndex(cfg *gds.FileConfig, path string) error {
	x, err := readIndex(path)
	if err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", path, err)
	}
	if len(x.WeightMap) == 0 {
		return fmt.Errorf("checkpoint: open %s: the index names no file", path)
	}
	headers := map[string]*safetensors.Header{}
	for _, name := range x.Files() {
		h, err := c.openFile(cfg, filepath.Join(filepath.Dir(path), name), func(t string) bool { return x.WeightMap[t] == name })
		if err != nil {
			return fmt.Errorf("%w (a file of the index %s)", err, path)
		}
		headers[name] = h
	}
	if err := x.Check(headers); err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", path, err)
	}
	return nil
}

func readIndex(path string) (*safetensors.Index, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return safetensors.ReadIndex(f, info.Size())
}

// hostReader reads a File into host memory.
type hostReader struct{ f *gds.File }

func (r hostReader) ReadAt(p []byte, off int64) (int, error) {
	n, err := files.Of(r.f).ReadHost(context.Background(), p, off)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}

// Infos returns the descriptions of all tensors, in the order of the files.
func (c *Checkpoint) Infos() []Info { return append([]Info(nil), c.infos...) }

// Info returns the description of a tensor.
func (c *Checkpoint) Info(name string) (Info, bool) {
	at, ok := c.where[name]
	if !ok {
		return Info{}, false
	}
	i := sort.Search(len(c.infos), func(i int) bool { return !before(c.where[c.infos[i].Name], at) })
	return c.infos[i], true
}

func before(a, b place) bool { return a.file < b.file || a.file == b.file && a.tensor < b.tensor }

// Metadata returns the texts in the headers of the files. If two files have the same key, the
// first file's text counts. The caller may change the map.
func (c *Checkpoint) Metadata() map[string]string {
	m := map[string]string{}
	for k, v := range c.metadata {
		m[k] = v
	}
	return m
}

// Bytes returns the size of all tensors.
func (c *Checkpoint) Bytes() (n int64) {
	for _, t := range c.infos {
		n += t.Bytes()
	}
	return n
}

// Status returns the status of each file, in their order.
func (c *Checkpoint) Status() []gds.Status {
	var all []gds.Status
	for _, f := range c.files {
		all = append(all, f.Status())
	}
	return all
}

// Close closes the files. Loaded tensors stay. It is idempotent and safe on nil.
func (c *Checkpoint) Close() error {
	if c == nil {
		return nil
	}
	return closeAll(c.files)
}

// dtypes are the format's types that memory.DType has too.
var dtypes = map[safetensors.DType]memory.DType{
	safetensors.Bool: memory.Bool, safetensors.U8: memory.Uint8, safetensors.I8: memory.Int8,
	safetensors.U16: memory.Uint16, safetensors.I16: memory.Int16, safetensors.U32: memory.Uint32, safetensors.I32: memory.Int32,
	safetensors.U64: memory.Uint64, safetensors.I64: memory.Int64, safetensors.F16: memory.Float16, safetensors.BF16: memory.BFloat16,
	safetensors.F32: memory.Float32, safetensors.F64: memory.Float64, safetensors.F8E4M3: memory.Float8E4M3, safetensors.F8E5M2: memory.Float8E5M2,
}

func dtypeOf(t safetensors.DType) memory.DType { return dtypes[t] }

// formatOf is dtypeOf the other way.
func formatOf(t memory.DType) (safetensors.DType, bool) {
	for f, m := range dtypes {
		if m == t {
			return f, true
		}
	}
	return 0, false
}
