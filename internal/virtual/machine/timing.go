package machine

import (
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/timeline"
)

// kindsOfNames are the kinds of operations in the timeline, by the beginnings of their names.
var kindsOfNames = []struct{ prefix, kind string }{
	{"kernel ", timeline.Kernel}, {"cuMemcpy", timeline.Copy}, {"cuMemset", timeline.Fill}, {"nccl", timeline.Collective},
	{"cublas", timeline.Kernel}, {"cuFile", timeline.Copy}, {"cuGraphLaunch", timeline.Graph}, {"cuLaunchHostFunc", timeline.Callback},
}

// ticket announces an operation to the timeline. It returns nil if no timeline is recorded, or if
// timelines do not show the operation. m.mu is held.
func (s *Stream) ticket(name string, bytes uint64) *timeline.Ticket {
	r := timeline.Current()
	if r == nil {
		return nil
	}
	for _, k := range kindsOfNames {
		if strings.HasPrefix(name, k.prefix) {
			on := timeline.Stream{Device: int(s.dev.ordinal), Handle: uint64(s.handle), Lane: s.lane}
			return r.Enqueue(k.kind, strings.TrimPrefix(name, "kernel "), on, bytes)
		}
	}
	return nil
}

// time runs the operation and records its time.
func (o *Op) time(run func(*Op)) {
	if o.ticket == nil {
		run(o)
		return
	}
	begin := time.Now()
	run(o)
	o.ticket.Done(begin, time.Now())
}

// timeSince ends a ticket when the stream arrives here, for an operation that began at a mark.
// m.mu is held.
func (s *Stream) timeSince(name string, start *Mark, t *timeline.Ticket) {
	if t != nil {
		s.push(&Op{Name: name, always: true, run: func(*Op) { t.Done(start.when, time.Now()) }})
	}
}
