// Package safetensors reads and writes the headers and indexes of safetensors
// files: which tensors a file has, of which type and shape, and which bytes are
// theirs. It moves no tensors itself, knows no GPU, and needs only the standard
// library.
//
// ReadHeader takes what the reference implementation takes, but for what leaves a
// doubt or does not fit: a name or a key of the metadata that occurs twice, where the
// reference lets the last one win; a tensor described by an array in place of an
// object; a dimension of more than 63 bits. Whatever a file says, reading it costs at
// most six times its header's bytes in memory, and twelve times those that are
// metadata or an index.
//
// A file is the length of its header as eight little-endian bytes, the header as
// JSON, and the tensors, row-major and little-endian, one after the other without
// holes.
package safetensors
