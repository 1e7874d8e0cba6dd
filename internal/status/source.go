package status

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
)

// A Source adds its part to an empty status.
type Source func(*Process)

// sources are the registered sources, oldest first.
var sources struct {
	mu   sync.Mutex
	list []*registered
}

// A registered source runs at most once at a time: a source may hang in a driver.
type registered struct {
	name string
	read Source
	busy chan struct{} // has an element during a run
}

// Add registers a source. The name appears in the status if the source does not answer in
// time. The caller must call remove when the source ends.
func Add(name string, read Source) (remove func()) {
	r := &registered{name: name, read: read, busy: make(chan struct{}, 1)}
	sources.mu.Lock()
	defer sources.mu.Unlock()
	sources.list = append(sources.list, r)
	return func() {
		sources.mu.Lock()
		defer sources.mu.Unlock()
		sources.list = slices.DeleteFunc(slices.Clone(sources.list), func(q *registered) bool { return q == r })
	}
}

// Take asks all sources at the same time, and returns the encoded status. Parts of sources
// that need longer than limit are missing.
func Take(limit time.Duration) []byte {
	sources.mu.Lock()
	list := slices.Clone(sources.list)
	sources.mu.Unlock()
	late, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	parts := make([]chan Process, len(list))
	for i, r := range list {
		parts[i] = r.start(late)
	}
	var all Process
	for i, part := range parts {
		if !all.add(part, late) {
			all.Notes = append(all.Notes, list[i].name+" did not answer in time: the driver may hang")
		}
	}
	return all.encode()
}

// add adds the part of a source, unless late ends first.
func (p *Process) add(part <-chan Process, late context.Context) bool {
	var q Process
	select {
	case q = <-part:
	default:
		select {
		case q = <-part:
		case <-late.Done():
			return false
		}
	}
	p.Groups, p.Devices, p.Notes = append(p.Groups, q.Groups...), append(p.Devices, q.Devices...), append(p.Notes, q.Notes...)
	p.NCCL = cmp.Or(p.NCCL, q.NCCL)
	p.Errors, p.Durations = append(p.Errors, q.Errors...), append(p.Durations, q.Durations...)
	return true
}

// start runs the source on a goroutine, unless another run of it lasts until late ends. The
// channel has room for the result.
func (r *registered) start(late context.Context) chan Process {
	part := make(chan Process, 1)
	go func() {
		select {
		case r.busy <- struct{}{}:
		case <-late.Done():
			return
		}
		var p Process
		r.read(&p)
		<-r.busy
		part <- p
	}()
	return part
}
