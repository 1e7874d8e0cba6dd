package fabric

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
)

// ErrAborted is what the operations of a rank return after Abort, and its Err. What
// was given up has left its destination undefined.
var ErrAborted = errors.New("the rank was aborted")

// errorf is fmt.Errorf with the package and the rank before it.
func (r *Rank) errorf(op, format string, args ...any) error {
	return fmt.Errorf("fabric: %s on rank %d of %d (%s): %w", op, r.rank, r.ranks, r.dev, fmt.Errorf(format, args...))
}

// A verdict is what a rank tells the others of its part in Open: why it cannot, or
// nothing.
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

// err is the error of the other ranks.
func (v *verdict) err(rank int) error {
	switch {
	case v.Failed == "":
		return nil
	case v.Need != "":
		return &ToldError{rank, unsupported(v.Need, v.Have)}
	}
	return &ToldError{rank, errors.New(v.Failed)}
}

// A ToldError is that of another rank, which has told all of it.
type ToldError struct {
	Rank int
	Err  error
}

func (e *ToldError) Error() string { return fmt.Sprintf("rank %d cannot: %v", e.Rank, e.Err) }

// Unwrap returns what the rank has told.
func (e *ToldError) Unwrap() error { return e.Err }

func unsupported(need, have string) error {
	return &device.UnsupportedError{Feature: "a fabric", Need: need, Have: have}
}
