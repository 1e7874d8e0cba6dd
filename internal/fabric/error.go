package fabric

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
)

// ErrAborted is the error of operations of a rank after Abort, and of its Err. The
// destinations of aborted operations are undefined.
var ErrAborted = errors.New("the rank was aborted")

// errorf is fmt.Errorf with the package and the rank as prefix.
func (r *Rank) errorf(op, format string, args ...any) error {
	return fmt.Errorf("fabric: %s on rank %d of %d (%s): %w", op, r.rank, r.ranks, r.dev, fmt.Errorf(format, args...))
}

// A verdict is the outcome of a rank's part of Open: the reason for its failure, or empty.
type verdict struct {
	Failed     string `json:",omitempty"`
	Need, Have string `json:",omitempty"` // of a *device.UnsupportedError
}

func verdictOf(err error) verdict {
	if err == nil {
		return verdict{}
	}
	v := verdict{Failed: err.Error()}
	if x, ok := errors.AsType[*device.UnsupportedError](err); ok {
		v.Need, v.Have = x.Need, x.Have
	}
	return v
}

// err returns the error for the other ranks.
func (v *verdict) err(rank int) error {
	switch {
	case v.Failed == "":
		return nil
	case v.Need != "":
		return &ToldError{rank, unsupported(v.Need, v.Have)}
	}
	return &ToldError{rank, errors.New(v.Failed)}
}

// A ToldError is the error of another rank; all ranks get it.
type ToldError struct {
	Rank int
	Err  error
}

func (e *ToldError) Error() string { return fmt.Sprintf("rank %d cannot: %v", e.Rank, e.Err) }

// Unwrap returns the other rank's error.
func (e *ToldError) Unwrap() error { return e.Err }

func unsupported(need, have string) error {
	return &device.UnsupportedError{Feature: "a fabric", Need: need, Have: have}
}
