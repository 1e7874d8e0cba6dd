package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/torchfile"
	"github.com/gochorus/chorus/memory"
)

// A Checkpoint is the tensors of one or more files. Load and LoadOn may read them any number of
// times, also by several goroutines and several groups at once.
type Checkpoint struct {
	files     []*gds.File
	headers   []*safetensors.Header
	infos     []Info // in file order
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

// openIn is Open for files in the folder of a Saver, without following a link
// out of the folder.
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
	c := *cmp.Or(cfg, new(gds.FileConfig))
	*handle.Of(&c) = root
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
	case !info.Mode().IsRegular():
		return fmt.Errorf("checkpoint: open %s: %w: not a regular file or a folder but %v", path, torchfile.ErrForeign, info.Mode())
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
	return fmt.Errorf("checkpoint: open folder %s: %w: want a safetensors file, an index, pytorch_model.bin, or a folder of a Saver or of torch.distributed.checkpoint", folder, torchfile.ErrForeign)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// escape returns a pattern that matches only the path.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// openFile opens a file, and adds the tensors that only selects, or all if only
// is nil, to the checkpoint.
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
	if err != nil && torchfile.IsPickle(start) {
		return nil, fmt.Errorf("%w: it begins like a pickle that torch.save did not write, and is no safetensors file: %w", torchfile.ErrForeign, err)
	}
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
	f, err := safe.Open(path)
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

// Infos returns the descriptions of all tensors, in file order.
func (c *Checkpoint) Infos() []Info { return append([]Info(nil), c.infos...) }

// Info returns the description of a tensor.
func (c *Checkpoint) Info(name string) (Info, bool) {
	if c == nil {
		return Info{}, false
	}
	at, ok := c.where[name]
	if !ok {
		return Info{}, false
	}
	i := sort.Search(len(c.infos), func(i int) bool { return !before(c.where[c.infos[i].Name], at) })
	return c.infos[i], true
}

func before(a, b place) bool { return a.file < b.file || a.file == b.file && a.tensor < b.tensor }

// Metadata returns the texts in the headers of the files, as a map that the
// caller may change. If two files have the same key, the first file's text
// counts.
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

// Close closes the files, but not the tensors that were loaded from them. It is
// idempotent and safe on nil.
func (c *Checkpoint) Close() error {
	if c == nil {
		return nil
	}
	return closeAll(c.files)
}

// check returns an error if c is no checkpoint of Open.
func (c *Checkpoint) check(op string) error {
	if c == nil || len(c.files) == 0 {
		return fmt.Errorf("checkpoint: %s: no checkpoint given", op)
	}
	return nil
}

// formats and dtypes convert between memory.DType and the types of the format, which has more.
var formats, dtypes = func() (formats map[memory.DType]safetensors.DType, dtypes map[safetensors.DType]memory.DType) {
	formats, dtypes = map[memory.DType]safetensors.DType{}, map[safetensors.DType]memory.DType{}
	for n, row := range dtype.All() {
		if f, err := safetensors.ParseDType(row.Safetensors); err == nil {
			formats[memory.DType(n)], dtypes[f] = f, memory.DType(n)
		}
	}
	return formats, dtypes
}()

// openDistributed opens a folder of torch.distributed.checkpoint.
func (c *Checkpoint) openDistributed(cfg *gds.FileConfig, folder string) error {
	path := filepath.Join(folder, torchfile.MetadataName)
	root, err := os.OpenRoot(folder)
	if err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", folder, err)
	}
	defer root.Close()
	text, err := safe.ReadIn(root, torchfile.MetadataName, torchfile.MostMetadata)
	if err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", path, err)
	}
	m, err := torchfile.ReadMetadata(text)
	if err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", path, err)
	}
	o := &opening{c: c, cfg: within(cfg, root), folder: folder, files: map[string]int{}}
	for i := range m.Tensors {
		if err := o.add(&m.Tensors[i]); err != nil {
			return err
		}
	}
	o.sort()
	return nil
}

// count counts the bytes of a tensor, because several chunks may have one place.
func (o *opening) count(t *torchfile.Distributed) error {
	o.data += int64(product(t.Shape) * t.DType.Bits() / 8)
	if err := torchfile.CheckBytes(o.data, o.size); err != nil {
		return fmt.Errorf("checkpoint: open %s: tensor %q of shape %v: %w", o.folder, t.Name, t.Shape, err)
	}
	return nil
}

// sort brings the chunks of each file into the file's order.
func (o *opening) sort() {
	for _, file := range slices.Backward(slices.Sorted(maps.Values(o.files))) {
		all := o.c.headers[file].Tensors
		slices.SortFunc(all, func(a, b safetensors.Tensor) int { return cmp.Compare(a.Begin, b.Begin) })
		for i := range slices.Backward(all) {
			o.c.where[all[i].Name] = place{file, i} // at last the first chunk
		}
	}
	o.c.sortInfos()
}

// An opening is a folder of torch.distributed.checkpoint that is being opened.
type opening struct {
	c      *Checkpoint
	cfg    *gds.FileConfig // for names in the folder
	folder string
	files  map[string]int // by name
	size   int64          // bytes of the files
	data   int64          // bytes of the tensors
	read   int64          // bytes of the chunks: many in one place would each be read
}

// file returns the number of a file, which it opens if it is not open.
func (o *opening) file(name string) (int, error) {
	if i, ok := o.files[name]; ok {
		return i, nil
	}
	f, err := gds.Open(name, o.cfg)
	if err != nil {
		return 0, err
	}
	o.c.files = append(o.c.files, f)
	size, err := f.Size()
	if err != nil {
		return 0, err
	}
	o.files[name], o.size = len(o.c.files)-1, o.size+size
	o.c.headers = append(o.c.headers, &safetensors.Header{Size: size})
	return o.files[name], nil
}

// add adds a tensor, as a run of the file if it has one chunk in row-major
// order.
func (o *opening) add(t *torchfile.Distributed) error {
	s := &scattered{shape: t.Shape, size: t.DType.Bits() / 8}
	whole := false
	var first place
	for i := range t.Chunks {
		k := &t.Chunks[i]
		file, err := o.file(k.File)
		if err != nil {
			return err
		}
		x, err := o.chunk(t, k, file)
		if err != nil {
			return &TensorError{Op: "open", Path: o.c.files[file].Path(), Tensor: t.Name, Offset: k.Offset, Err: err}
		}
		b := boxOf(x, file, k.Offset)
		b.at = k.At
		s.boxes = append(s.boxes, b)
		whole = len(t.Chunks) == 1 && x.Contiguous()
		h := o.c.headers[file]
		if i == 0 {
			first = place{file, len(h.Tensors)}
		}
		e := entryOf(x)
		e.Begin, e.End = e.Begin+k.Offset, e.End+k.Offset
		h.Tensors = append(h.Tensors, e)
	}
	if err := o.count(t); err != nil {
		return err
	}
	if !whole {
		o.c.scatter(t.Name, s)
	}
	if err := o.c.add(first, &safetensors.Tensor{Name: t.Name, DType: t.DType, Shape: t.Shape}); err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", o.folder, err)
	}
	return nil
}

// Chunks of one place are read once for each of them. A folder may have mostReads bytes of chunks for each byte of its files, and
// mostSmallChunks more.
const (
	mostReads       = 4
	mostSmallChunks = 64 << 20
)

// chunk reads the description of a chunk, and compares it with the metadata.
func (o *opening) chunk(t *torchfile.Distributed, k *torchfile.Chunk, file int) (*torchfile.Tensor, error) {
	if size := o.c.headers[file].Size; k.Offset+k.Length > size {
		return nil, fmt.Errorf("the chunk at %v has %d bytes, but the file ends at byte %d", k.At, k.Length, size)
	}
	if o.read += k.Length; o.read-mostSmallChunks > mostReads*o.size {
		return nil, fmt.Errorf("the chunks so far have %d bytes in files of %d bytes: too many of them share a place", o.read, o.size)
	}
	x, err := torchfile.Read(io.NewSectionReader(hostReader{o.c.files[file]}, k.Offset, k.Length), k.Length)
	if err != nil {
		return nil, err
	}
	if len(x.Tensors) != 1 || x.Tensors[0].DType != t.DType || !slices.Equal(x.Tensors[0].Shape, k.N) {
		return nil, fmt.Errorf("the chunk at %v is not one tensor of type %s and shape %v", k.At, t.DType, k.N)
	}
	x.Tensors[0].Name = t.Name
	return &x.Tensors[0], nil
}

// addTorch adds the tensors of a file of torch.save, and returns a header that
// describes them.
func (c *Checkpoint) addTorch(f *gds.File, size int64, only func(name string) bool) (*safetensors.Header, error) {
	x, err := torchfile.Read(hostReader{f}, size)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(x.Tensors, func(a, b torchfile.Tensor) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Name, b.Name))
	})
	h := &safetensors.Header{Size: size, Metadata: x.Values}
	file := len(c.files) - 1
	for i := range x.Tensors {
		t := &x.Tensors[i]
		h.Tensors = append(h.Tensors, entryOf(t))
		if only != nil && !only(t.Name) {
			continue
		}
		if err := c.add(place{file, i}, &h.Tensors[i]); err != nil {
			return nil, err
		}
		if !t.Contiguous() {
			c.scatter(t.Name, &scattered{shape: t.Shape, size: t.Size(), boxes: []filed{boxOf(t, file, 0)}})
		}
	}
	return h, nil
}

// entryOf describes a tensor like the header of a safetensors file. If the tensor is a view
// with strides, its end is where a contiguous tensor would end.
func entryOf(t *torchfile.Tensor) safetensors.Tensor {
	return safetensors.Tensor{Name: t.Name, DType: t.DType, Shape: t.Shape, Begin: t.Offset, End: t.Offset + int64(t.Elements()*t.Size())}
}

// boxOf returns the place of a tensor that begins at an offset of a file.
func boxOf(t *torchfile.Tensor, file int, base int64) filed {
	return filed{at: make([]int, len(t.Shape)), n: t.Shape, file: file, off: base + t.Offset, strides: t.Strides}
}

func (c *Checkpoint) scatter(name string, s *scattered) {
	if c.scattered == nil {
		c.scattered = map[string]*scattered{}
	}
	c.scattered[name] = s
}

// add adds a tensor of a file to the checkpoint.
func (c *Checkpoint) add(at place, t *safetensors.Tensor) error {
	path := c.files[at.file].Path()
	if other, taken := c.where[t.Name]; taken {
		return fmt.Errorf("tensor %q is in %s, too", t.Name, c.files[other.file].Path())
	}
	c.where[t.Name] = at
	c.infos = append(c.infos, Info{Name: t.Name, DType: dtypes[t.DType], Format: t.DType, Shape: t.Shape, File: path})
	return nil
}

// openManifest opens the checkpoint of a Saver, with whole tensors.
func (c *Checkpoint) openManifest(cfg *gds.FileConfig, folder string) error {
	s, err := openSaved(folder, cfg)
	if err != nil {
		return err
	}
	base := len(c.files)
	c.files, c.headers = append(c.files, s.files.files...), append(c.headers, s.files.headers...)
	c.addMetadata(s.files.metadata)
	for i := range s.m.Tensors {
		t := &s.m.Tensors[i]
		format, _ := safetensors.ParseDType(t.DType) // checked when it was read
		x := &scattered{shape: []int{t.Rows, t.Width}, size: format.Bits() / 8}
		for j := range t.Parts {
			p := &t.Parts[j]
			at := s.files.where[p.Key]
			x.boxes = append(x.boxes, filed{at: []int{0, p.Start}, n: []int{t.Rows, p.Len}, file: base + at.file,
				off: s.files.headers[at.file].Tensors[at.tensor].Begin, strides: []int{p.Len, 1}})
		}
		at := s.files.where[t.Parts[0].Key]
		if err := c.add(place{base + at.file, at.tensor}, &safetensors.Tensor{Name: t.Name, DType: format, Shape: t.Shape}); err != nil {
			return fmt.Errorf("checkpoint: open %s: %w", folder, err)
		}
		if len(t.Parts) > 1 {
			if x.size == 0 {
				return fmt.Errorf("checkpoint: open %s: tensor %q of %s has several parts: %w", folder, t.Name, format, errors.ErrUnsupported)
			}
			c.scatter(t.Name, x)
		}
	}
	c.sortInfos()
	return nil
}

func (c *Checkpoint) sortInfos() {
	slices.SortFunc(c.infos, func(a, b Info) int {
		x, y := c.where[a.Name], c.where[b.Name]
		return cmp.Or(cmp.Compare(x.file, y.file), cmp.Compare(x.tensor, y.tensor))
	})
}

// isSaved reports whether a Saver has written the folder.
func isSaved(folder string) bool { return exists(filepath.Join(folder, manifestName)) }
