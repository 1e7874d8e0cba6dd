// Package torchfile reads files of torch.save and the metadata of
// torch.distributed.checkpoint: the names, types, shapes and places of tensors, and plain
// values. It does not read the elements of tensors.
//
// A file of torch.save is a zip archive without compression: a pickle of the object, and one
// entry for each storage. The pickle names classes and functions. This package knows a fixed
// list of them and interprets them as data. Another name is an error, and no code runs.
//
// The memory for a file is limited by the constants of this package, whatever the file says.
package torchfile

// Limits of a file. A state dict of 100,000 tensors has a directory of 9 MB and a pickle of
// 15 MB with 3 million values.
const (
	mostDirectory = 32 << 20 // bytes of the directory of an archive
	mostPickle    = 256 << 20
	mostValues    = 16 << 20 // of a pickle
	mostDepth     = 64       // of containers in each other
	mostName      = 64 << 10 // bytes of a tensor's name
)
