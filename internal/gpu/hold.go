package gpu

import (
	"errors"
	"fmt"
)

// ErrCapturing is returned by Close of a graph that is being captured.
var ErrCapturing = errors.New("the capture has not ended")

// A Holder is a graph that holds the objects that it has captured. Close returns
// ErrCapturing if it must wait for the end of the capture.
type Holder interface {
	fmt.Stringer
	Close() error
}

// A Holdable is an object that must not be closed while a graph that captured it exists.
type Holdable interface {
	Hold(h Holder)
	LetGo(h Holder)
}

// A Preparer is a Holdable that must be called before each launch of a graph, with the
// stream of the launch. For example, a random number generator then sets its position in
// the sequence. After a successful Prepare, Launched is called once, when the launch has
// been enqueued or has failed; until then other calls of Prepare wait. The stream is a
// public one.
type Preparer interface {
	Holdable
	Prepare(s HasStream) error
	Launched(s HasStream)
}
