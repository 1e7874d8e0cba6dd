package gds

import (
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/gochorus/chorus/gds/safetensors"
)

// A TensorError says at which tensor of a checkpoint something went wrong.
type TensorError struct {
	Op     string // such as "load"
	Path   string // of the file
	Tensor string
	Offset int64 // in the file; -1 where it is about no byte
	Err    error
}

func (e *TensorError) Error() string {
	why := ": " + strings.TrimPrefix(e.Err.Error(), "gds: ")
	if of, ok := errors.AsType[*Error](e.Err); ok && of.Error() == e.Err.Error() { // which names the same place
		why = of.story()
	}
	if e.Offset < 0 {
		return fmt.Sprintf("gds: %s %s: tensor %q%s", e.Op, e.Path, e.Tensor, why)
	}
	return fmt.Sprintf("gds: %s %s: tensor %q at byte %d%s", e.Op, e.Path, e.Tensor, e.Offset, why)
}

// Unwrap returns the cause.
func (e *TensorError) Unwrap() error { return e.Err }

// named names the tensor in errors that say where in a file something went wrong.
func (m *carrier) named(errs []error) []error {
	for i, err := range errs {
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Offset < 0 {
			continue
		}
		for f, file := range m.files {
			if file.Path() == e.Path {
				errs[i] = &TensorError{Op: m.op, Path: e.Path, Tensor: tensorAt(m.headers[f], e.Offset), Offset: e.Offset, Err: err}
			}
		}
	}
	return errs
}

// tensorAt returns the name of the tensor that has a byte of a file, or that follows
// it.
func tensorAt(h *safetensors.Header, off int64) string {
	all := h.Tensors
	i := sort.Search(len(all), func(i int) bool { return all[i].End > off })
	if i == len(all) {
		return "(after the last)"
	}
	return all[i].Name
}
