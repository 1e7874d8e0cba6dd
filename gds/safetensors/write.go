package safetensors

import (
	"fmt"
	"io"
)

// Data is a tensor with its bytes in host memory.
type Data struct {
	Tensor
	Raw []byte // row-major, little-endian
}

// Write writes a complete file from host memory; see NewHeader for the order of
// the tensors. If the number of bytes of a tensor does not match its type and
// shape, Write fails before it writes anything.
func Write(w io.Writer, metadata map[string]string, data ...Data) error {
	tensors := make([]Tensor, len(data))
	raw := make(map[string][]byte, len(data))
	for i, d := range data {
		tensors[i], raw[d.Name] = d.Tensor, d.Raw
	}
	h, start, err := NewHeader(tensors, metadata)
	if err != nil {
		return err
	}
	for _, t := range h.Tensors {
		if n := int64(len(raw[t.Name])); n != t.Bytes() {
			return fmt.Errorf("safetensors: tensor %q: got %d bytes, but shape %s of %v takes %d", short(t.Name), n, shapeText(t.Shape), t.DType, t.Bytes())
		}
	}
	if _, err := w.Write(start); err != nil {
		return fmt.Errorf("safetensors: write the header: %w", err)
	}
	for _, t := range h.Tensors {
		if _, err := w.Write(raw[t.Name]); err != nil {
			return fmt.Errorf("safetensors: write tensor %q at byte %d: %w", short(t.Name), t.Begin, err)
		}
	}
	return nil
}
