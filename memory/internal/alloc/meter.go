package alloc

// A Gauge is one of torch's statistics.
type Gauge uint8

// The gauges, with torch's names.
const (
	Allocation         Gauge = iota // blocks that callers have
	Segments                        //
	Active                          // blocks that callers or streams may still use
	InactiveSplit                   // free parts of segments
	AllocatedBytes                  //
	ReservedBytes                   //
	ActiveBytes                     //
	InactiveSplitBytes              //
	RequestedBytes                  // requested bytes of Active
	gauges
)

// scopes are small, large, and both together.
const (
	both   = kinds
	scopes = kinds + 1
)

// A reading is one gauge of one scope. now may grow up to cap without a new peak of the
// device. sum is the total of all increases, start the value of now at the last reset;
// both are used for the two kinds only.
type reading struct{ now, sum, start, cap int64 }

// A meter counts for one domain, under its lock. The device's peaks are exact although
// no stream writes to memory of another stream: each domain has caps whose sum over all
// domains is at most the peak. Only a domain that exceeds its cap reads the others.
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

// near reports whether n more could be a new peak.
func (m *meter) near(k kind, g Gauge, n int64) bool {
	r, all := &m.r[g][k], &m.r[g][both]
	return r.now+n > r.cap || all.now+n > all.cap
}

func (m *meter) down(k kind, g Gauge, n int64) {
	m.r[g][k].now -= n
	m.r[g][both].now -= n
}

// lend counts an allocation, giveBack a free, and retire a freed block that no stream
// uses any more.
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

// change calls up or down.
func (m *meter) change(k kind, g Gauge, n int64) {
	if n >= 0 {
		m.up(k, g, n)
	} else {
		m.down(k, g, -n)
	}
}

// adjustCaps updates the peaks and assigns new caps, after a meter exceeded a cap. All
// domains are locked.
func (d *Device) adjustCaps(domains []*domain) {
	for g := range gauges {
		for s := range scopes {
			d.grant(domains, g, s)
		}
	}
	for _, dom := range domains {
		dom.meter.high = false
	}
}

// grant distributes a peak among the domains. The cap of a domain is at least its
// current value, and is only lowered if another domain needs it.
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
	// First use the part of the peak that no domain has, then lower the largest unused
	// caps.
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

// A Stat is torch's form of a gauge: Allocated and Freed are the sums of all increases
// and decreases since the start or the last reset.
type Stat struct{ Current, Peak, Allocated, Freed int64 }

// A PoolStat is a gauge for both kinds of segments together and for each kind.
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

// Read returns the values of a gauge.
func (d *Device) Read(g Gauge) PoolStat {
	domains := d.lockAll()
	defer unlock(domains)
	return PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
}

// ResetPeaks sets the peaks to the current values.
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

// ResetSums sets the sums of increases and decreases to zero.
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

// ReadAll returns all gauges, read at one moment.
func (d *Device) ReadAll() (all [gauges]PoolStat) {
	domains := d.lockAll()
	defer unlock(domains)
	for g := range gauges {
		all[g] = PoolStat{All: d.stat(domains, g, both), Small: d.stat(domains, g, small), Large: d.stat(domains, g, large)}
	}
	return all
}
