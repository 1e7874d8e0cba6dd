package safetensors

// MaxHeader is how many bytes a header may have, its length not counted: the
// reference implementation's limit.
const MaxHeader = 100_000_000

// reserved is the key of a header that is not a tensor's.
const reserved = "__metadata__"

// A Header says what a file has. Nothing changes it after it was made, so any
// number of goroutines may read it.
type Header struct {
	Tensors    []Tensor          // in the order of the file; empty ones before what begins at the same byte, by name
	Metadata   map[string]string // nil when the header has none
	DataOffset int64             // of the first tensor's data in the file, bytes
	Size       int64             // of the file, bytes

	names table
}

// Lookup returns the tensor of that name.
func (h *Header) Lookup(name string) (Tensor, bool) {
	if i, ok := h.names.find(h.Tensors, name); ok {
		return h.Tensors[i], true
	}
	return Tensor{}, false
}
