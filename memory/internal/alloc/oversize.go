package alloc

import "sync"

// oversize counts blocks and segments that are too large to be split.
type oversize struct {
	mu               sync.Mutex
	blocks, segments Stat
}

func (o *oversize) up(s *Stat) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.Current++
	s.Allocated++
	s.Peak = max(s.Peak, s.Current)
}

func (o *oversize) down(s *Stat) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.Current--
	s.Freed++
}

func (o *oversize) resetPeaks() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.blocks.Peak, o.segments.Peak = o.blocks.Current, o.segments.Current
}

func (o *oversize) resetSums() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range []*Stat{&o.blocks, &o.segments} {
		s.Allocated, s.Freed = 0, 0
	}
}
