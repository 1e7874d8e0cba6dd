// Package safetensors reads and writes headers and indexes of safetensors files: the
// tensors of a file with their types, shapes and positions. It does not transfer
// tensors, does not use a GPU, and depends only on the standard library.
//
// ReadHeader accepts the files that the reference implementation accepts, except for
// ambiguous or unrepresentable content. That is a duplicate name or metadata key (the
// reference uses the last one), a tensor described by an array instead of an object, or a
// dimension of more than 63 bits. Reading takes at most 256 KiB and six times the size of the
// header in memory, and 256 KiB and twelve times for metadata and indexes.
//
// A file consists of the length of its header in eight little-endian bytes, the header
// in JSON, and the tensors, row-major and little-endian, without gaps.
package safetensors
