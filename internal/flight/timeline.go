package flight

import (
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/timeline"
)

// open begins the operation in the timeline. Accept ends it.
func (r *Recorder) open(t *timeline.Recorder, o *Op) {
	if r.shown.Swap(t) != t {
		r.show(t, gpu.StreamOf(o.Stream).Place().Device)
	}
	k := &Kinds[o.Kind]
	op := timeline.Op{
		Group: r.Group, Name: o.Kind.String(), Sequence: o.Number, Transfer: k.Peer, Rank: r.Rank, Peer: -1,
		Bytes: uint64(max(o.In, o.Out) * o.DType.Size()),
	}
	if k.Rooted {
		op.Peer = o.Root
	}
	gpu.StreamOf(o.Stream).OpenCollective(t, op)
}

// show describes the rank to the timeline.
func (r *Recorder) show(t *timeline.Recorder, device int) {
	r.mu.Lock()
	r.ordinal = device
	m := &timeline.Membership{Group: r.Group, Label: r.Name, Rank: r.Rank, Size: r.Size, World: r.world, WorldSize: r.worldSize}
	r.mu.Unlock()
	registerAccount()
	t.SetObserver(countDuration)
	t.Add(timeline.Record{Kind: timeline.Member, Name: r.Device, Device: device, Begin: t.Now(), Member: m})
}

// refuseOpen removes an operation that was refused from the timeline.
func (r *Recorder) refuseOpen(e *Entry) {
	if t := timeline.Current(); t != nil && r.shown.Load() == t {
		t.Refuse(timeline.Stream{Device: r.ordinal, Handle: uint64(e.stream)})
	}
}
