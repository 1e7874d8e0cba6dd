package cluster

import (
	"sync/atomic"
	"time"
)

// A pulse notices that this very process was stopped or starved: its tick comes
// much later than due. The silence of others that falls into such a pause says
// nothing about them.
type pulse struct {
	slow    time.Duration // between ticks, from which on it was a pause
	begin   time.Time
	ticked  atomic.Int64 // since begin, at the last tick
	resumed atomic.Int64 // at the end of the last pause; 0 before any
}

func newPulse(w welcome) *pulse {
	return &pulse{slow: max(2*w.Heartbeat, w.LostAfter/3), begin: time.Now()}
}

// run ticks until quit is closed.
func (p *pulse) run(every time.Duration, quit <-chan struct{}) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-quit:
			return
		case <-t.C:
			p.tick()
		}
	}
}

func (p *pulse) tick() {
	now := int64(time.Since(p.begin))
	if time.Duration(now-p.ticked.Swap(now)) > p.slow {
		p.resumed.Store(now)
	}
}

// paused reports that this process stood still at some time after since.
func (p *pulse) paused(since time.Time) bool {
	p.tick() // whoever asks may run before the ticker does
	r := p.resumed.Load()
	return r > 0 && r >= int64(since.Sub(p.begin))
}
