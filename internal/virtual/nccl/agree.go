package nccl

import (
	"encoding/binary"
	"fmt"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// kind is the kind of an NCCL operation.
type kind uint8

const (
	kindAllReduce kind = iota + 1
	kindBroadcast
	kindReduce
	kindAllGather
	kindReduceScatter
	kindAlltoAll
	kindGather
	kindScatter
	kindSend
	kindRecv
)

var kindNames = [...]string{"", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter",
	"all_to_all", "gather", "scatter", "send", "recv"}

func (k kind) rooted() bool {
	return k == kindBroadcast || k == kindReduce || k == kindGather || k == kindScatter
}

func (k kind) reduces() bool { return k == kindAllReduce || k == kindReduce || k == kindReduceScatter }

// A signature holds the parameters that must be the same on all ranks. It is sent
// in this memory layout.
type signature struct {
	Seq   uint64 // index of the operation on the communicator, from 0
	Count uint64
	Op    int32
	Root  int32 // or peer
	Kind  kind
	DType uint8
	Event bool // the rank gives an event for the completion of the launch
	_     byte
	Call  uint32 // identifies the configuration of the call; 0 is none

	Send, Recv place // of the operands that other ranks access
}

// A place is an offset in a symmetric window.
type place struct {
	Window uint64 // its number, from 1; 0 is none
	Offset uint64
}

// fits reports whether two ranks may have operands at these places. A rank whose operands do not lie in
// windows tells NCCL to use other kernels.
func (p place) fits(q place) bool { return p == q || p.Window == 0 || q.Window == 0 }

// same compares without the index: a rank that issued one more send has another
// count, but may still agree.
func (s *signature) same(o *signature) bool {
	return s.Kind == o.Kind && s.Count == o.Count && s.DType == o.DType && s.Op == o.Op && s.Root == o.Root &&
		s.Event == o.Event && s.Call == o.Call && s.Send.fits(o.Send) && s.Recv.fits(o.Recv)
}

func (s *signature) String() string {
	t := fmt.Sprintf("%s(%d x %s", kindNames[s.Kind], s.Count, dtypeName(ncclapi.DType(s.DType)))
	switch {
	case s.Kind.reduces():
		t += ", " + redopName(ncclapi.RedOp(s.Op))
	case s.Kind == kindSend:
		t += fmt.Sprintf(", to rank %d", s.Root)
	case s.Kind == kindRecv:
		t += fmt.Sprintf(", from rank %d", s.Root)
	}
	if s.Kind.rooted() {
		t += fmt.Sprintf(", root %d", s.Root)
	}
	if s.Call != 0 {
		t += fmt.Sprintf(", configuration %08x", s.Call)
	}
	for i, p := range []place{s.Send, s.Recv} {
		if p.Window != 0 {
			t += fmt.Sprintf(", %s at byte %d of window %d", []string{"source", "destination"}[i], p.Offset, p.Window)
		}
	}
	if s.Event {
		t += ", a launch-completion event"
	}
	return fmt.Sprintf("%s) as operation %d", t, s.Seq)
}

func redopName(op ncclapi.RedOp) string {
	if names := []string{"sum", "prod", "max", "min", "avg"}; op >= 0 && int(op) < len(names) {
		return names[op]
	}
	return "pre-multiplied sum"
}

// A claim is a rank's knowledge about the next operations of other ranks: the
// operation of the lowest known rank, and the operation of the lowest rank that
// differs from it.
type claim struct {
	Magic  uint32
	Differ int32 // the rank of Other, or -1
	Lowest int32
	_      int32
	First  signature
	Other  signature
}

const claimMagic = 0x43484f52

var claimSize = binary.Size(claim{})

// merge adds the knowledge of another rank. The result does not depend on the
// order of merges, so all ranks report the same two ranks.
func (a *claim) merge(b *claim) {
	if b.Lowest < a.Lowest {
		lower := *b
		b = new(*a)
		*a = lower
	}
	consider := func(rank int32, s *signature) {
		if rank >= 0 && !s.same(&a.First) && (a.Differ < 0 || rank < a.Differ) {
			a.Differ, a.Other = rank, *s
		}
	}
	consider(b.Lowest, &b.First)
	consider(b.Differ, &b.Other)
}

// agree compares the operation with the operations of all ranks in ⌈log₂ n⌉
// rounds: in round k each rank sends all it knows to the rank 2ᵏ after it. It
// returns only after all ranks have begun their operation.
func (c *comm) agree(s *signature) error {
	mine := &claim{Magic: claimMagic, Differ: -1, Lowest: int32(c.rank), First: *s}
	for hop := 1; hop < c.n; hop *= 2 {
		out, err := c.to((c.rank + hop) % c.n)
		if err != nil {
			return err
		}
		if err := out.writeClaim(mine); err != nil {
			return err
		}
		in, err := c.from((c.rank - hop + c.n) % c.n)
		if err != nil {
			return err
		}
		theirs, err := in.readClaim()
		if err != nil {
			return err
		}
		mine.merge(theirs)
	}
	if mine.Differ >= 0 {
		return c.disagree(int(mine.Lowest), &mine.First, int(mine.Differ), &mine.Other)
	}
	return nil
}

// disagree fails the communicator because of two different operations.
func (c *comm) disagree(a int, first *signature, b int, other *signature) error {
	c.fail(difference(a, first, b, other))
	return errStopped
}

// difference describes two different operations.
func difference(a int, first *signature, b int, other *signature) *failure {
	if b < a {
		a, b, first, other = b, a, other, first
	}
	return &failure{ncclapi.InvalidUsage, fmt.Sprintf("the ranks do not issue the same operations: rank %d issued %v, rank %d issued %v",
		a, first, b, other)}
}

func (k *link) writeClaim(v *claim) error {
	p, err := binary.Append(make([]byte, 0, claimSize), binary.LittleEndian, v)
	if err != nil {
		return err
	}
	return k.write(p)
}

// valid reports whether a rank in a world of n can have sent the claim.
func (v *claim) valid(n int) bool {
	return v.Magic == claimMagic && v.Lowest >= 0 && int(v.Lowest) < n && v.Differ >= -1 && int(v.Differ) < n &&
		v.First.valid(n) && v.Other.valid(n)
}

// valid reports whether a rank in a world of n can have sent the signature.
func (s *signature) valid(n int) bool {
	return int(s.Kind) < len(kindNames) && s.Op >= 0 && s.Root >= -1 && int(s.Root) < n
}

func (k *link) readClaim() (*claim, error) {
	p := make([]byte, claimSize)
	if err := k.read(p); err != nil {
		return nil, err
	}
	v := new(claim)
	if _, err := binary.Decode(p, binary.LittleEndian, v); err != nil {
		return nil, err
	}
	if !v.valid(k.c.n) {
		k.c.fail(&failure{ncclapi.InternalError, fmt.Sprintf("rank %d sent invalid data instead of an operation", k.peer)})
		<-k.c.stop
		return nil, errStopped
	}
	return v, nil
}
