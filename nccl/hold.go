package nccl

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// An InUseError says that a communicator cannot be closed because a graph has
// captured operations of it: NCCL would wait until the graph is gone.
type InUseError struct {
	Op         string // "close" or "shut down"
	Rank, Size int
	Device     string
	Graph      string // the first such graph
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("nccl: %s rank %d of %d (%s): %s uses it: close the graph first", e.Op, e.Rank, e.Size, e.Device, e.Graph)
}

// holds are the graphs that use a communicator.
type holds struct {
	mu    sync.Mutex
	by    []stream.Holder
	abort bool // when the last one lets go
}

// Hold notes that a graph uses c. For Chorus's own packages.
func (c *Communicator) Hold(g stream.Holder) {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if !slices.Contains(c.holds.by, g) {
		c.holds.by = append(c.holds.by, g)
	}
}

// LetGo undoes Hold. For Chorus's own packages.
func (c *Communicator) LetGo(g stream.Holder) {
	c.holds.mu.Lock()
	c.holds.by = slices.DeleteFunc(c.holds.by, func(h stream.Holder) bool { return h == g })
	abort := c.holds.abort && len(c.holds.by) == 0
	c.holds.mu.Unlock()
	if abort {
		_ = c.Abort()
	}
}

// InUse returns an *InUseError if a graph uses c, and a *GroupError if the goroutine has
// operations of c in a group. For Chorus's own packages.
func (c *Communicator) InUse(op string) error {
	if c == nil {
		return nil
	}
	if g := openGroup(); g != nil && slices.ContainsFunc(g.ops, func(o operation) bool { return o.comm == c }) {
		return &GroupError{fmt.Sprintf("nccl: %s rank %d of %d (%s)", op, c.rank, c.size, c.dev)}
	}
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if len(c.holds.by) == 0 {
		return nil
	}
	return &InUseError{Op: op, Rank: c.rank, Size: c.size, Device: c.dev.String(), Graph: c.holds.by[0].String()}
}

// closeGraphs closes the graphs that use c. It reports false if one is being
// captured: the abort then comes with the end of the capture.
func (c *Communicator) closeGraphs() bool {
	c.holds.mu.Lock()
	by := slices.Clone(c.holds.by)
	c.holds.abort = true
	c.holds.mu.Unlock()
	closed := true
	for _, g := range by {
		// A driver that does not answer does when the communicator is aborted.
		if err, _ := poll.Within(callPatience, g.Close); errors.Is(err, stream.ErrCapturing) {
			closed = false
		}
	}
	return closed
}
