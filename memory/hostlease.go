package memory

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// A hostLease is the use of one piece of pinned memory. It begins when the memory is
// allocated and ends when no device uses it any more. It is a gpu.Preparer for the
// graphs that captured a copy from or to the memory.
type hostLease struct {
	end func() // called once, at the end of the lease

	mu     sync.Mutex
	closed bool // by its owner; streams and graphs may still use the memory
	busy   int  // calls that are enqueueing an operation
	graphs []gpu.Holder
	users  []*stream.Stream // whose operations use it; each is retained

	marks []hostMark // the positions of the users; guarded by the allocator's lock
}

// manyUsers is the number of users that makes the list drop idle streams, so that
// long-lived memory does not keep every stream alive that ever used it.
const manyUsers = 8

// beginUse records that the caller is about to enqueue an operation on s that uses the
// memory. The caller then calls done. It fails if the owner has closed the memory.
func (l *hostLease) beginUse(op string, s *stream.Stream) error {
	if err := l.addUser(s, false); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Prepare records that a launch of a graph on s will use the memory. The graph holds
// the memory, so the owner may have closed it.
func (l *hostLease) Prepare(s gpu.HasStream) error { return l.addUser(s.(*stream.Stream), true) }

// Launched ends the use that Prepare began.
func (l *hostLease) Launched(gpu.HasStream) { l.done() }

func (l *hostLease) addUser(s *stream.Stream, held bool) error {
	if !gpu.StreamOf(s).Retain() {
		return fmt.Errorf("%s: %w", s, device.ErrClosed)
	}
	noted, err := l.addRetained(s, held)
	if !noted {
		err = errors.Join(err, gpu.StreamOf(s).Release())
	}
	return err
}

// addRetained is addUser for a stream that is retained; it keeps that reference if it adds s as
// a user.
func (l *hostLease) addRetained(s *stream.Stream, held bool) (noted bool, err error) {
	capture, err := gpu.StreamOf(s).CaptureID()
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
	if err := gpu.StreamOf(s).Captured(l); err != nil {
		l.done()
		return false, err
	}
	return false, nil
}

// note adds s to the users unless it is one already. l.mu is held.
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

// forgetIdle drops the users whose operations have completed. l.mu is held.
func (l *hostLease) forgetIdle() {
	l.users = slices.DeleteFunc(l.users, func(s *stream.Stream) bool {
		if gpu.AnyCapture() || !idle(s) {
			return false
		}
		_ = gpu.StreamOf(s).Release() // a stream that cannot be destroyed does no harm
		return true
	})
}

// idle reports whether all work of a retained stream has completed.
func idle(s *stream.Stream) bool {
	done, _ := gpu.DeviceOf(s.Device()).ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(gpu.StreamOf(s).Raw()) })
	return done
}

// done ends a use that use began.
func (l *hostLease) done() {
	l.mu.Lock()
	l.busy--
	l.unlock()
}

// unlock unlocks l.mu, and ends the lease if nothing uses the memory any more.
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

// close records that the owner has closed the memory.
func (l *hostLease) close() {
	l.mu.Lock()
	l.closed = true
	l.unlock()
}

// Hold keeps the memory alive for a graph.
func (l *hostLease) Hold(g gpu.Holder) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.graphs = append(l.graphs, g)
}

// LetGo undoes Hold. Launches in progress are among the users.
func (l *hostLease) LetGo(g gpu.Holder) {
	l.mu.Lock()
	if i := slices.Index(l.graphs, g); i >= 0 {
		l.graphs = slices.Delete(l.graphs, i, i+1)
	}
	l.unlock()
}

// holders returns the names of the graphs that hold the memory. l.mu is held.
func (l *hostLease) holders() string {
	var names []string
	for _, g := range l.graphs {
		names = append(names, g.String())
	}
	return strings.Join(names, ", ")
}
