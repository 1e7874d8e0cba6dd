package cluster

import (
	"sync/atomic"
	"time"
)

// A pauseDetector detects that this process itself was suspended or starved: its tick is
// much later than due. Silence of other processes during such a pause is not a
// failure.
type pauseDetector struct {
	slow    time.Duration // interval between ticks that counts as a pause
	begin   time.Time
	ticked  atomic.Int64 // since begin, at the last tick
	resumed atomic.Int64 // at the end of the last pause; 0 before any
}

func newPauseDetector(w welcome) *pauseDetector {
	return &pauseDetector{slow: max(2*w.Heartbeat, w.LostAfter/3), begin: time.Now()}
}

// run ticks until quit is closed.
func (p *pauseDetector) run(every time.Duration, quit <-chan struct{}) {
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

func (p *pauseDetector) tick() {
	now := int64(time.Since(p.begin))
	if time.Duration(now-p.ticked.Swap(now)) > p.slow {
		p.resumed.Store(now)
	}
}

// paused reports whether this process was paused at some time after since.
func (p *pauseDetector) paused(since time.Time) bool {
	p.tick() // the caller may run before the ticker
	r := p.resumed.Load()
	return r > 0 && r >= int64(since.Sub(p.begin))
}
