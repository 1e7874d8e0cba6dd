package checkpoint

import (
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
)

// A TensorError is an error about one tensor of a checkpoint.
type TensorError struct {
	Op     string // such as "load"
	Path   string // of the file
	Tensor string
	Offset int64 // in the file; -1 if the error is about no byte
	Err    error
}

func (e *TensorError) Error() string {
	text := e.Err.Error()
	why := ": " + strings.TrimPrefix(text, "checkpoint: ")
	if of, ok := errors.AsType[*gds.Error](e.Err); ok && of.Error() == text {
		why = strings.TrimPrefix(text, placeOf(of)) // which e names itself
	}
	if e.Offset < 0 {
		return fmt.Sprintf("checkpoint: %s %s: tensor %q%s", e.Op, e.Path, e.Tensor, why)
	}
	return fmt.Sprintf("checkpoint: %s %s: tensor %q at byte %d%s", e.Op, e.Path, e.Tensor, e.Offset, why)
}

// placeOf returns the beginning of the text of an error about a file.
func placeOf(e *gds.Error) string {
	if e.Offset < 0 {
		return fmt.Sprintf("gds: %s %s", e.Op, e.Path)
	}
	return fmt.Sprintf("gds: %s %s at byte %d", e.Op, e.Path, e.Offset)
}

// Unwrap returns the cause.
func (e *TensorError) Unwrap() error { return e.Err }

// A RankError names the rank that could not move its part. All ranks get one, also in other
// processes. The error of the rank itself wraps the cause.
type RankError struct {
	Op     string // "load" or "save"
	Rank   int
	Reason string
	Err    error // nil if the rank is in another process
}

func (e *RankError) Error() string {
	return fmt.Sprintf("checkpoint: %s: rank %d: %s", e.Op, e.Rank, e.Reason)
}

func (e *RankError) Unwrap() error { return e.Err }

// named adds the name of the tensor to errors about a byte of a file.
func (m *executor) named(errs []error) []error {
	for i, err := range errs {
		e, ok := errors.AsType[*gds.Error](err)
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

// tensorAt returns the name of the tensor that has a byte of a file, or of the next tensor.
func tensorAt(h *safetensors.Header, off int64) string {
	all := h.Tensors
	i := sort.Search(len(all), func(i int) bool { return all[i].End > off })
	if i == len(all) {
		return "(after the last)"
	}
	return all[i].Name
}
