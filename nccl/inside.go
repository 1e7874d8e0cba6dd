package nccl

import (
	"bytes"
	"slices"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/stream"
)

// ref is how packages above nccl reach the inside of a communicator.
type ref = ranks.Ref

// An inside is a communicator as packages above nccl see it.
type inside struct{ c *Communicator }

func (x inside) AddBackend(abort func()) { x.c.addBackend(abort) }

func (x inside) Services(n int) (first uint64, list []ranks.Service) { return x.c.rec.Services(n) }

func (x inside) Signatures(n int) (first uint64, list []uint32) { return x.c.rec.Signatures(n) }

func (x inside) Dump(n, limit int) []byte {
	list := slices.DeleteFunc(liveMembers(), func(m *member) bool { return m.Device != x.c.rec.Device })
	poll.Within(observeTime, func() error { observe(list); return nil })
	for ; n > 0; n /= 2 {
		var b bytes.Buffer
		if err := flight.DumpShort(&b, recorders(list), n); err == nil && b.Len() <= limit {
			return b.Bytes()
		}
	}
	return nil
}

func (x inside) SetWorld(ranks []int, size int) { x.c.rec.SetWorld(ranks, size) }

func (x inside) WriteTraces() {
	x.c.observeBeforeTraces()
	x.c.writeTraces()
}

func (x inside) RecordEnd(end string, follows bool) { x.c.rec.SetEnd(end, follows) }

func (x inside) Noticed() error {
	if f := x.c.failed.Load(); f != nil {
		return f.cause()
	}
	return nil
}

func (x inside) Symmetric(k *ranks.Collective) bool {
	return symmetricKernel(k.Kind, k.DType, k.Op) && !x.c.symmetricKernelWrong(k.Kind, k.Bytes()) && !(k.Captured && x.c.symmetricKernelStale())
}

func (x inside) Factor(op flight.Reduction) (bits, at uint64, ok bool) {
	v, ok := x.c.sums.Load(Op(op))
	if !ok {
		return 0, 0, false
	}
	f := v.(factor)
	return f.bits, f.at, true
}

func (x inside) NoWindows() error { return x.c.needs(ncclapi.FuncCommWindowRegister) }

func (x inside) Point(s *stream.Stream) ranks.Point { return x.c.point(s) }

func (x inside) Completed(p ranks.Point) error { return x.c.completed(p) }

func (x inside) CannotComplete(p ranks.Point) error { return x.c.cannotComplete(p) }

func (x inside) ChecksNaN() bool { return x.c.nan != nil }

func (x inside) Ended() error { return x.c.endedBy() }

func (x inside) InUse(op string) error { return x.c.inUse(op) }

func (x inside) AbortFailed() bool { return x.c.abortFailure.Load() != nil }

// addBackend is documented in package ranks.
func (c *Communicator) addBackend(abort func()) {
	c.rec.SetUnordered()
	c.abortOthers.Store(&abort)
}

// abortBackends ends the operations of other backends that are in flight.
func (c *Communicator) abortBackends() {
	if abort := c.abortOthers.Load(); abort != nil {
		(*abort)()
	}
}
