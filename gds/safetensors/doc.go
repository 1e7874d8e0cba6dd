// Package safetensors reads and writes the headers and indexes of safetensors
// files: which tensors a file has, of which type and shape, and which bytes are
// theirs. It moves no tensors itself, knows no GPU, and needs only the standard
// library.
//
// ReadHeader is as strict as the reference implementation and stricter where that
// leaves a doubt: a name that occurs twice is refused, where the reference lets
// the last one win. Whatever a file says, reading costs at most six times the
// bytes of its header in memory, or ten where they are all metadata.
//
// A file is the length of its header as eight little-endian bytes, the header as
// JSON, and the tensors, row-major and little-endian, one after the other without
// holes.
package safetensors
