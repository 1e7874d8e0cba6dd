package comm

import (
	"errors"

	"github.com/gochorus/chorus/stream"
)

// Between enqueues collectives between two points of other streams. The group's streams wait
// for the operations that are enqueued on streams so far. Then fn enqueues collectives, and
// streams wait for these collectives before they continue. streams[i] is for local rank i, on
// the rank's device, and may be the group's own stream. The call does not block, and a graph
// can capture it. The streams wait also if fn returns an error.
func (g *Group) Between(streams []*stream.Stream, fn func() error) error {
	const op = "between"
	if err := g.check(op); err != nil {
		return err
	}
	if fn == nil || len(streams) != g.Locals() {
		return badArgument(op, "%d streams, and a function is given: %t; want a function and a stream for each of the %d local ranks", len(streams), fn != nil, g.Locals())
	}
	for i, s := range streams {
		if s == nil || s.Device() != g.Device(i) {
			return badArgument(op, "stream %d is nil or on another device than rank %d: want a stream on %s", i, i, g.Device(i))
		}
	}
	for i, s := range streams {
		if s != g.Stream(i) {
			if err := g.Stream(i).WaitStream(s); err != nil {
				return err
			}
		}
	}
	err := fn()
	for i, s := range streams {
		if s != g.Stream(i) {
			err = errors.Join(err, s.WaitStream(g.Stream(i)))
		}
	}
	return err
}
