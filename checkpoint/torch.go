package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/torchfile"
)

// addTorch adds the tensors of a file of torch.save. It returns a header that describes them.
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
	c.infos = append(c.infos, Info{Name: t.Name, DType: dtypeOf(t.DType), Format: t.DType, Shape: t.Shape, File: path})
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
