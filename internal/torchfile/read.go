// Package torchfile reads files of torch.save and the metadata of
// torch.distributed.checkpoint: the names, types, shapes and places of tensors, and plain
// values. It does not read the elements of tensors.
//
// A file of torch.save is a zip archive without compression: a pickle of the object, and one
// entry for each storage. The pickle names classes and functions. This package knows a fixed
// list of them and interprets them as data. Another name is an error, and no code runs.
//
// Snapshots of memory, and PyTorch's dumps of collectives, are pickles of plain data: dictionaries, lists,
// tuples, strings, numbers and None. PyTorch's viewer understands only these. [DecodePickle] rejects classes
// and calls; [DecodePickleObjects] passes them to its caller as data.
//
// The memory for a file is limited by the constants of this package, whatever the file says.
package torchfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// A File is the content of a file of torch.save.
type File struct {
	Tensors []Tensor          // as in the state dict
	Values  map[string]string // plain values as JSON, by name
}

// startBytes is how many bytes of a file Is needs.
const startBytes = 32

// Is reports whether a file begins like a file of torch.save, of the zip format or of the one
// before it. start is its first 32 bytes, or all if it has fewer.
func Is(start []byte) bool { return isZip(start) || isLegacy(start) }

// isZip excludes a safetensors file whose header has such a length: its JSON begins after it.
func isZip(start []byte) bool {
	return len(start) >= 9 && binary.LittleEndian.Uint32(start) == localSignature && start[8] != '{'
}

// isLegacy reports whether the file begins with the pickle of torch's number for such files.
func isLegacy(start []byte) bool {
	if bytes.HasPrefix(start, []byte("L119547037146038801333356L\n")) { // protocols 0 and 1
		return true
	}
	if len(start) < 2 || start[0] != 0x80 {
		return false
	}
	const frame = 9 // of protocols 4 and 5
	if start = start[2:]; len(start) > frame && start[0] == 0x95 {
		start = start[frame:]
	}
	return bytes.HasPrefix(start, []byte("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"))
}

// ErrForeign matches the error of a file or folder that is none of the formats of checkpoints, not even a damaged one.
var ErrForeign = errors.New("not a checkpoint")

// IsPickle reports whether a file begins like a pickle of protocol 2 or newer, as files of torch.save before the zip format do, too.
// It excludes a safetensors file whose header has such a length.
func IsPickle(start []byte) bool {
	return len(start) >= 2 && start[0] == 0x80 && start[1] >= 2 && start[1] <= 5 && (len(start) < 9 || start[8] != '{')
}

// Start reads the bytes that Is needs.
func Start(r io.ReaderAt, size int64) ([]byte, error) {
	b := make([]byte, min(size, startBytes))
	n, err := r.ReadAt(b, 0)
	if n == len(b) {
		err = nil
	}
	return b[:n], err
}

// Read reads a file of size bytes. An object that is a tensor, and not a dictionary of tensors,
// has the name "tensor".
func Read(r io.ReaderAt, size int64) (*File, error) {
	f, err := read(r, size)
	if err != nil {
		return nil, fmt.Errorf("torch.save file: %w", err)
	}
	return f, nil
}

func read(r io.ReaderAt, size int64) (*File, error) {
	start, err := Start(r, size)
	switch {
	case err != nil:
		return nil, err
	case isLegacy(start):
		return nil, errors.New("it has the format before PyTorch 1.6: convert it in Python: torch.save(torch.load(OLD), NEW)")
	case !isZip(start):
		return nil, errors.New("it does not begin like a zip archive")
	}
	a, err := openArchive(r, size)
	if err != nil {
		return nil, err
	}
	root, err := a.root()
	if err != nil {
		return nil, err
	}
	e := a.entries[root+"data.pkl"]
	text, err := a.open(e)
	if err != nil {
		return nil, err
	}
	o := &objects{archive: a, prefix: root + "data/", known: map[string]*storage{}}
	object, err := DecodePickleObjects(text, &PickleLimits{Bytes: mostPickle, Values: mostValues}, o)
	if err != nil {
		return nil, fmt.Errorf("entry %q: %w", e.name, err)
	}
	f := &flattener{file: &File{Values: map[string]string{}}, tensors: map[string]bool{}, size: e.size, whole: size}
	if err := f.add("", object, 0); err != nil {
		return nil, fmt.Errorf("entry %q: %w", e.name, err)
	}
	return f.file, nil
}

// root returns the folder of all entries, after it has checked that this package can read them.
func (a *archive) root() (string, error) {
	root, found := "", false
	for name := range a.entries {
		if folder, ok := strings.CutSuffix(name, "data.pkl"); ok && strings.Count(folder, "/") == 1 && strings.HasSuffix(folder, "/") {
			if found {
				return "", errors.New("the archive has two entries data.pkl")
			}
			root, found = folder, true
		}
	}
	switch {
	case !found:
		return "", fmt.Errorf("%w: the archive has no entry data.pkl: torch.save did not write it", ErrForeign)
	case a.entries[root+"constants.pkl"] != nil:
		return "", errors.New("it is a TorchScript program: save the state_dict() of the model instead")
	}
	e := a.entries[root+"byteorder"]
	if e == nil {
		return root, nil
	}
	text, err := a.open(e)
	if err != nil {
		return "", err
	}
	order, err := io.ReadAll(io.LimitReader(text, 16))
	if err == nil && string(order) != "little" {
		err = fmt.Errorf("its byte order is %q: want little", order)
	}
	return root, err
}

// Limits of a file. A state dict of 100,000 tensors has a directory of 9 MB and a pickle of
// 15 MB with 3 million values.
const (
	mostDirectory = 32 << 20 // bytes of the directory of an archive
	mostPickle    = 256 << 20
	mostValues    = 16 << 20 // of a pickle
	mostDepth     = 64       // of containers in each other
	mostName      = 64 << 10 // bytes of a tensor's name
)
