package checkpoint

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/internal/torchfile"
)

// openDistributed opens a folder of torch.distributed.checkpoint.
func (c *Checkpoint) openDistributed(cfg *gds.FileConfig, folder string) error {
	path := filepath.Join(folder, torchfile.MetadataName)
	root, err := os.OpenRoot(folder)
	if err != nil {
		return fmt.Errorf("checkpoint: open %s: %w", folder, err)
	}
	defer root.Close()
	text, err := safefile.ReadIn(root, torchfile.MetadataName, torchfile.MostMetadata)
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

// add adds a tensor. If it has one chunk in row-major order, it is a run of the file.
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

// chunk reads the description of a chunk, and compares it with the metadata.
func (o *opening) chunk(t *torchfile.Distributed, k *torchfile.Chunk, file int) (*torchfile.Tensor, error) {
	if size := o.c.headers[file].Size; k.Offset+k.Length > size {
		return nil, fmt.Errorf("the chunk at %v has %d bytes, but the file ends at byte %d", k.At, k.Length, size)
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
