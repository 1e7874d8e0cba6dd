package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/race"
)

func (d driver) MemLend(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	d.t.audit("MemLend", p, n, s, race.Run{State: race.Lent}, race.Here())
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		return a.MemLend(p, n, s)
	}
	return cudadrv.Success
}

func (d driver) MemReturn(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	d.t.audit("MemReturn", p, n, s, race.Run{State: race.Returned, By: s}, race.Here())
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		return a.MemReturn(p, n, s)
	}
	return cudadrv.Success
}

// audit records that an allocator has allocated or freed a piece: a write of its bytes. If the
// host has waited for everything on the stream, it has waited for the write too.
func (t *tracker) audit(name string, p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream, to race.Run, where *race.Place) {
	t.mu.Lock()
	defer t.unlock()
	b := t.blocks.find(uint64(p))
	if b == nil || b.freed != "" {
		return
	}
	if b.pieces == nil {
		b.pieces = race.NewPieces(b.size)
	}
	lo := uint64(p) - b.base
	hi := min(lo+uint64(n), b.size)
	q := t.queue(b.ctx, s)
	if q.capture != nil {
		b.pieces.Set(lo, hi, race.Run{State: race.Captured}, true)
		return
	}
	waited := t.host.Covers(q.now)
	t.perform(&node{act: func(q *queue) {
		by := race.Access{Slot: q.now.Slot, Epoch: q.now.Epoch, Op: name, Stream: s, Where: where}
		t.order(b, q, race.Conflict{By: by, Write: true, Lo: lo, Hi: hi})
	}}, []*queue{q})
	if waited {
		t.host = t.host.JoinStamp(q.now)
	}
	b.pieces.Audited = true
	b.pieces.Set(lo, hi, to, false)
}
