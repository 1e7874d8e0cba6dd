package safetensors

// maxHeader is the maximum size of a header in bytes, without its length, as in
// the reference implementation.
const maxHeader = 100_000_000

// reserved is the only key of a header that is not the name of a tensor.
const reserved = "__metadata__"

// A Header describes the content of a file. It is immutable and safe for
// concurrent use.
type Header struct {
	Tensors    []Tensor          // in the order of the file; an empty tensor precedes others at the same position, by name
	Metadata   map[string]string // nil if the header has no metadata
	DataOffset int64             // position of the first tensor's data in bytes
	Size       int64             // size of the file in bytes

	names table
}

// Lookup returns the tensor with a name.
func (h *Header) Lookup(name string) (Tensor, bool) {
	if i, ok := h.names.find(h.Tensors, name); ok {
		return h.Tensors[i], true
	}
	return Tensor{}, false
}
