package checkpoint

import (
	"context"
	"fmt"
	"hash"
	"io"
	"maps"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
)

// Export writes all tensors as safetensors files on the host, without a device: the file at
// path, which ends in .safetensors. If the tensors have more than MaxFileBytes, Export writes
// several files and an index, as Save does, which replace older files in the same way. Each
// tensor is stored whole and contiguous.
//
// If cfg has no Metadata, the files have the metadata of the checkpoint, and "format": "pt",
// which Hugging Face's readers want. Export needs 8 MiB of memory for each file that it writes
// at the same time, at most 16, and returns when the files are on the disk.
func (c *Checkpoint) Export(ctx context.Context, path string, cfg *SaveConfig) error {
	var sc SaveConfig
	if cfg != nil {
		sc = *cfg
	}
	if !strings.HasSuffix(path, extension) || sc.MaxFileBytes < 0 {
		return fmt.Errorf("checkpoint: export to %s in files of %d bytes: want a name that ends in %s, and 0 bytes or more", path, sc.MaxFileBytes, extension)
	}
	if sc.Metadata == nil {
		sc.Metadata = c.headerTexts()
	}
	out, err := newOutput(path, c.entries(), &sc)
	if err != nil {
		return err
	}
	defer out.close() // removes files that were not committed
	if err := out.open(); err != nil {
		return err
	}
	moved := progress(sc.Progress, c.Bytes())
	err = each(ctx, numbers(len(out.files)), func(ctx context.Context, number string) error {
		i, _ := strconv.Atoi(number)
		return files.Of(out.files[i]).WriteHost(func(w io.Writer) error {
			return c.writeFile(ctx, w, out.starts[i], out.headers[i], nil, moved)
		})
	})
	if err != nil {
		return err
	}
	return out.commit(ctx)
}

// headerTexts returns the metadata of the checkpoint, and the format.
func (c *Checkpoint) headerTexts() map[string]string {
	texts := map[string]string{"format": "pt"}
	maps.Copy(texts, c.metadata)
	return texts
}

// entries describes the tensors for the header of a file.
func (c *Checkpoint) entries() []safetensors.Tensor {
	var all []safetensors.Tensor
	for _, t := range c.infos {
		all = append(all, safetensors.Tensor{Name: t.Name, DType: t.Format, Shape: t.Shape})
	}
	return all
}

// numbers returns the numbers below n as texts.
func numbers(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	return all
}

// writeFile writes a safetensors file. digest returns the hash of a tensor, or digest is nil.
func (c *Checkpoint) writeFile(ctx context.Context, w io.Writer, start []byte, h *safetensors.Header, digest func(name string) hash.Hash, moved func(int)) error {
	if _, err := w.Write(start); err != nil {
		return err
	}
	host := make([]byte, verifyChunk)
	for i := range h.Tensors {
		t := &h.Tensors[i]
		to := w
		if digest != nil {
			to = io.MultiWriter(w, digest(t.Name))
		}
		for at := int64(0); at < t.Bytes(); at += int64(len(host)) {
			n := min(int64(len(host)), t.Bytes()-at)
			if err := c.read(ctx, t.Name, host[:n], at); err != nil {
				return err
			}
			if _, err := to.Write(host[:n]); err != nil {
				return fmt.Errorf("tensor %q at byte %d: %w", t.Name, t.Begin+at, err)
			}
			if moved != nil {
				moved(int(n))
			}
		}
	}
	return nil
}
