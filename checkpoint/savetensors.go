package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// SaveTensors writes tensors of the device of s, of any layout, as Save writes weights
// (safetensors.torch.save_file). It comes after the work that is now on s.
func SaveTensors(ctx context.Context, s *stream.Stream, path string, tensors map[string]tensor.Tensor, cfg *SaveConfig) error {
	var c SaveConfig
	if cfg != nil {
		c = *cfg
	}
	infos, err := describe(s, path, tensors, c.MaxFileBytes)
	if err != nil {
		return err
	}
	out, err := newOutput(path, infos, &c)
	if err != nil {
		return err
	}
	defer out.close() // removes files that were not committed
	if err := out.create(); err != nil {
		return err
	}
	total := int64(0)
	for _, x := range tensors {
		total += int64(x.Bytes())
	}
	moved := progress(c.Progress, total)
	for i, f := range out.files {
		if err := writeTensors(ctx, f, s, out.headers[i], tensors, moved); err != nil {
			return err
		}
	}
	return out.commit(ctx)
}

// describe checks the tensors and describes them for the files, by name.
func describe(s *stream.Stream, path string, tensors map[string]tensor.Tensor, most int64) ([]safetensors.Tensor, error) {
	if err := gpu.CheckStream("checkpoint: save", s, nil); err != nil {
		return nil, err
	}
	if !strings.HasSuffix(path, extension) || most < 0 {
		return nil, fmt.Errorf("checkpoint: save %s in files of %d bytes: want a name that ends in %s, and 0 bytes or more", path, most, extension)
	}
	var infos []safetensors.Tensor
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		x := tensors[name]
		format, ok := formatOf(x.DType())
		err := strided.Check("checkpoint: save", x, nil)
		if err == nil && x.IsHost() {
			err = errors.New("it is in host memory: copy it to the device of the stream")
		}
		if err == nil {
			err = strided.Check("checkpoint: save", x, s.Device())
		}
		if err == nil && !ok {
			err = fmt.Errorf("the format has no type %s: %w", x.DType(), errors.ErrUnsupported)
		}
		if err != nil {
			return nil, &TensorError{Op: "save", Path: path, Tensor: name, Offset: -1, Err: err}
		}
		infos = append(infos, safetensors.Tensor{Name: name, DType: format, Shape: x.Shape()})
	}
	return infos, nil
}

// writeTensors writes the tensors of a header. It copies tensors that are not contiguous first,
// one at a time.
func writeTensors(ctx context.Context, f *gds.File, s *stream.Stream, h *safetensors.Header, tensors map[string]tensor.Tensor, moved func(int)) error {
	var rows []files.Piece
	for i := range h.Tensors {
		t := &h.Tensors[i]
		x := tensors[t.Name]
		if x.Contiguous() {
			p, err := pieceOf(x, t.Begin)
			if err != nil {
				return err
			}
			rows = append(rows, p)
			continue
		}
		if err := writePacked(ctx, f, s, x, t.Begin, moved); err != nil {
			return &TensorError{Op: "save", Path: f.Path(), Tensor: t.Name, Offset: t.Begin, Err: err}
		}
	}
	return files.Of(f).Write(ctx, s, rows, files.Hooks{Moved: moved})
}

func writePacked(ctx context.Context, f *gds.File, s *stream.Stream, x tensor.Tensor, off int64, moved func(int)) error {
	packed, err := tensor.Make(s, x.DType(), x.Shape()...)
	if err != nil {
		return err
	}
	defer packed.Close()
	if err := tensor.Copy(s, packed, x); err != nil {
		return err
	}
	p, err := pieceOf(packed, off)
	if err != nil {
		return err
	}
	return files.Of(f).Write(ctx, s, []files.Piece{p}, files.Hooks{Moved: moved})
}

// pieceOf returns all bytes of a contiguous tensor.
func pieceOf(x tensor.Tensor, off int64) (files.Piece, error) {
	if x.Len() == 0 {
		return files.Piece{Off: off}, nil
	}
	mem, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
	return files.Piece{Off: off, Mem: mem}, err
}
