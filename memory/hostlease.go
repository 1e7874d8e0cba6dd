package memory

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

// A hostLease is the use of one piece of pinned memory: from the moment that it
// is handed out until nothing on any device uses it. It is a stream.Preparer for
// the graphs that captured a copy from or to it.
type hostLease struct {
	end func() // what is done, once, when it is over

	mu     sync.Mutex
	closed bool // by its owner; streams and graphs may still use it
	busy   int  // calls that are enqueueing work
	graphs []stream.Holder
	users  []*stream.Stream // whose work uses it; each is retained

	marks []hostMark // where the users were; the allocator's lock guards it
}

// Beyond so many users the idle ones are forgotten, so that memory that lives
// long does not keep alive all streams that ever used it.
const manyUsers = 8

// use notes that what the caller is about to enqueue on s uses the memory. The
// caller then calls done. It fails when the owner has closed the memory.
func (l *hostLease) use(op string, s *stream.Stream) error {
	if err := l.enter(s, false); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Prepare notes that a launch on s will use the memory: of a graph that holds it,
// so the owner may have closed it.
func (l *hostLease) Prepare(s *stream.Stream) error { return l.enter(s, true) }

// Launched ends what Prepare began.
func (l *hostLease) Launched(*stream.Stream) { l.done() }

func (l *hostLease) enter(s *stream.Stream, held bool) error {
	if !s.Retain() {
		return fmt.Errorf("%s: %w", s, device.ErrClosed)
	}
	noted, err := l.begin(s, held)
	if !noted {
		err = errors.Join(err, s.Release())
	}
	return err
}

// begin is enter for a stream that is held, and takes that over if it has noted it.
func (l *hostLease) begin(s *stream.Stream, held bool) (noted bool, err error) {
	capture, err := s.CaptureID()
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	if l.closed && !held {
		l.mu.Unlock()
		return false, device.ErrClosed
	}
	if capture == 0 {
		noted = l.note(s)
	}
	l.busy++
	l.mu.Unlock()
	if capture == 0 {
		return noted, nil
	}
	if err := s.Captured(l); err != nil {
		l.done()
		return false, err
	}
	return false, nil
}

// note adds a user, if it is none yet. l.mu is held.
func (l *hostLease) note(s *stream.Stream) bool {
	if slices.Contains(l.users, s) {
		return false
	}
	if len(l.users) >= manyUsers && l.busy == 0 {
		l.forgetIdle()
	}
	l.users = append(l.users, s)
	return true
}

// forgetIdle drops the users that have nothing left to do. l.mu is held.
func (l *hostLease) forgetIdle() {
	l.users = slices.DeleteFunc(l.users, func(s *stream.Stream) bool {
		if stream.AnyCapture() || !idle(s) {
			return false
		}
		_ = s.Release() // a stream that cannot be destroyed costs nobody anything
		return true
	})
}

// idle reports whether all work of a retained stream has completed.
func idle(s *stream.Stream) bool {
	return s.Device().DoRelaxed("cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s.Raw()) }) == nil
}

// done ends what use began.
func (l *hostLease) done() {
	l.mu.Lock()
	l.busy--
	l.unlock()
}

// unlock unlocks l.mu, and ends the lease if it is over.
func (l *hostLease) unlock() {
	over := l.closed && l.busy == 0 && len(l.graphs) == 0 && l.end != nil
	end := l.end
	if over {
		l.end = nil
	}
	l.mu.Unlock()
	if over {
		end()
	}
}

// close is the owner's last call.
func (l *hostLease) close() {
	l.mu.Lock()
	l.closed = true
	l.unlock()
}

// Hold keeps the memory for a graph.
func (l *hostLease) Hold(g stream.Holder) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.graphs = append(l.graphs, g)
}

// LetGo undoes Hold. Launches that are under way are among the users.
func (l *hostLease) LetGo(g stream.Holder) {
	l.mu.Lock()
	if i := slices.Index(l.graphs, g); i >= 0 {
		l.graphs = slices.Delete(l.graphs, i, i+1)
	}
	l.unlock()
}

// holders names the graphs that hold the memory. l.mu is held.
func (l *hostLease) holders() string {
	var names []string
	for _, g := range l.graphs {
		names = append(names, g.String())
	}
	return strings.Join(names, ", ")
}
