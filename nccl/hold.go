package nccl

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// An InUseError reports that a communicator cannot be closed because a graph has captured
// its operations: NCCL would wait until the graph is closed.
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
	by    []gpu.Holder
	abort bool // abort when the last graph is closed
}

// A held is a communicator as the graphs see it that use it.
type held struct{ *Communicator }

// Hold notes that a graph uses c.
func (c held) Hold(g gpu.Holder) {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if !slices.Contains(c.holds.by, g) {
		c.holds.by = append(c.holds.by, g)
	}
}

// LetGo undoes Hold.
func (c held) LetGo(g gpu.Holder) {
	c.holds.mu.Lock()
	c.holds.by = slices.DeleteFunc(c.holds.by, func(h gpu.Holder) bool { return h == g })
	abort := c.holds.abort && len(c.holds.by) == 0
	c.holds.mu.Unlock()
	if abort {
		_ = c.Abort()
	}
}

// inUse returns an *InUseError if a graph uses c.
func (c *Communicator) inUse(op string) error {
	if c == nil {
		return nil
	}
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if len(c.holds.by) == 0 {
		return nil
	}
	return &InUseError{Op: op, Rank: c.rank, Size: c.size, Device: c.dev.String(), Graph: c.holds.by[0].String()}
}

// noGraphs reports whether no graph uses c any more. If a graph is closed while a goroutine
// launches it, it is destroyed after the launch, and NCCL must not free the communicator
// earlier.
func (c *Communicator) noGraphs() bool {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	return len(c.holds.by) == 0
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
		// If the driver does not answer, it will after the communicator is aborted.
		if err, _ := poll.Within(callTimeout, g.Close); errors.Is(err, stream.ErrCapturing) {
			closed = false
		}
	}
	return closed
}
