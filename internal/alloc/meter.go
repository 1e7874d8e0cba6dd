package alloc

// A Gauge is one of torch's statistics.
type Gauge uint8

// The gauges, with torch's names.
const (
	Allocation         Gauge = iota // blocks that callers have
	Segments                        //
	Active                          // blocks that callers have or streams may still use
	InactiveSplit                   // free parts of segments
	AllocatedBytes                  //
	ReservedBytes                   //
	ActiveBytes                     //
	InactiveSplitBytes              //
	RequestedBytes                  // of what callers have and streams may still use
	gauges
)

// scopes are small, large, and both together.
const (
	both   = kinds
	scopes = kinds + 1
)

// A reading is one gauge of one scope. cap is how high now may go without a new
// peak of the device. sum and start count what came and what was there at the last
// reset, for the two kinds only.
type reading struct{ now, sum, start, cap int64 }

// A meter counts for one domain, under its lock. The device's peaks are exact
// although no stream touches what another one writes: each domain is granted caps
// whose sum over all domains is no more than the peak, and only one that goes
// beyond its cap looks at the others.
type meter struct {
	r    [gauges][scopes]reading
	high bool // a cap was exceeded
}

func (m *meter) up(k kind, g Gauge, n int64) {
	r, all := &m.r[g][k], &m.r[g][both]
	r.sum += n
	r.now += n
	all.now += n
	if r.now > r.cap || all.now > all.cap {
		m.high = true
	}
}

// near says whether n more might be a new peak.
func (m *meter) near(k kind, g Gauge, n int64) bool {
	r, all := &m.r[g][k], &m.r[g][both]
	return r.now+n > r.cap || all.now+n > all.cap
}

func (m *meter) down(k kind, g Gauge, n int64) {
	m.r[g][k].now -= n
	m.r[g][both].now -= n
}

// lend counts a block that a caller gets, giveBack one that it gives back, and
// retire one that no stream uses any more.
func (m *meter) lend(k kind, size, requested int64) {
	m.up(k, Allocation, 1)
	m.up(k, AllocatedBytes, size)
	m.up(k, Active, 1)
	m.up(k, ActiveBytes, size)
	m.up(k, RequestedBytes, requested)
}

func (m *meter) giveBack(k kind, size int64) {
	m.down(k, Allocation, 1)
	m.down(k, AllocatedBytes, size)
}

func (m *meter) retire(k kind, size, requested int64) {
	m.down(k, Active, 1)
	m.down(k, ActiveBytes, size)
	m.down(k, RequestedBytes, requested)
}

// change is up or down.
func (m *meter) change(k kind, g Gauge, n int64) {
	if n >= 0 {
		m.up(k, g, n)
	} else {
		m.down(k, g, -n)
	}
}

// settle finds new peaks and grants new caps, after a meter went high. All domains
// are locked.
func (d *Device) settle(domains []*domain) {
	for g := range gauges {
		for s := range scopes {
			d.grant(domains, g, s)
		}
	}
	for _, dom := range domains {
		dom.meter.high = false
	}
}

// grant divides a peak among the domains: nobody has less than it has now, and
// nobody loses a grant that no other needs.
func (d *Device) grant(domains []*domain, g Gauge, s kind) {
	var now, over, caps int64
	for _, dom := range domains {
		r := &dom.meter.r[g][s]
		now += r.now
		caps += r.cap
		over += max(r.now-r.cap, 0)
	}
	peak := &d.peaks[g][s]
	*peak = max(*peak, now)
	if over == 0 {
		return
	}
	// What is granted to nobody goes first, and then what others have the most of.
	for spare := *peak - caps; spare < over; {
		r := slackest(domains, g, s)
		slack := r.cap - r.now
		give := min(slack, over-spare)
		r.cap -= give
		spare += give
	}
	for _, dom := range domains {
		r := &dom.meter.r[g][s]
		r.cap = max(r.cap, r.now)
	}
}

// slackest returns the reading that is farthest below its cap.
func slackest(domains []*domain, g Gauge, s kind) (most *reading) {
	for _, dom := range domains {
		if r := &dom.meter.r[g][s]; most == nil || r.cap-r.now > most.cap-most.now {
			most = r
		}
	}
	return most
}

// settleAlone is settle for the only domain of a device, under its lock.
func (d *Device) settleAlone(m *meter) {
	for g := range gauges {
		for s := range scopes {
			r := &m.r[g][s]
			if r.now > r.cap {
				r.cap = r.now
				d.peaks[g][s] = r.now
			}
		}
	}
	m.high = false
}

// A Stat is torch's view of a gauge: Allocated and Freed are how much came and
// went since the start or the last reset.
type Stat struct{ Current, Peak, Allocated, Freed int64 }

// A PoolStat has a gauge of both sorts of segments together and of each.
type PoolStat struct{ All, Small, Large Stat }

func (d *Device) stat(domains []*domain, g Gauge, s kind) Stat {
	x := Stat{Peak: d.peaks[g][s]}
	for _, dom := range domains {
		r := &dom.meter.r[g]
		x.Current += r[s].now
		for k := range kinds {
			if s == k || s == both {
				x.Allocated += r[k].sum
				x.Freed += r[k].start + r[k].sum - r[k].now
			}
		}
	}
	return x
}

// Read returns a gauge.
func (d *Device) Read(g Gauge) PoolStat {
	domains := d.lockAll()
	defer unlock(domains)
	return PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
}

// ResetPeaks makes the present values the peaks.
func (d *Device) ResetPeaks() {
	domains := d.lockAll()
	defer unlock(domains)
	for g := range gauges {
		for s := range scopes {
			d.peaks[g][s] = 0
			for _, dom := range domains {
				r := &dom.meter.r[g][s]
				r.cap = r.now
				d.peaks[g][s] += r.now
			}
		}
	}
	d.oversize.resetPeaks()
}

// ResetSums begins to count anew what came and went.
func (d *Device) ResetSums() {
	domains := d.lockAll()
	for _, dom := range domains {
		for g := range gauges {
			for k := range kinds {
				r := &dom.meter.r[g][k]
				r.sum, r.start = 0, r.now
			}
		}
	}
	unlock(domains)
	d.oversize.resetSums()
	for _, c := range []*counter{&d.retries, &d.ooms, &d.syncs, &d.taken, &d.given} {
		c.Store(0)
	}
}

// ReadAll returns all gauges of one moment.
func (d *Device) ReadAll() (all [gauges]PoolStat) {
	domains := d.lockAll()
	defer unlock(domains)
	for g := range gauges {
		all[g] = PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
	}
	return all
}
