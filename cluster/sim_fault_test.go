package cluster

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// A simConfig describes a job of the simulation.
type simConfig struct {
	seed      uint64 // of the network and of the paces of workers
	hosts     int
	late      int // further hosts, which join later
	least     int
	local     int // workers of a host
	seeds     int
	restarts  int
	pace      int // selects how long functions need to return after their epochs; -1: all return at once
	latency   time.Duration
	lostAfter time.Duration
	calm      time.Duration // after the faults, before the last check; 0 means no check
}

func (c *simConfig) timing() Timing {
	return Timing{Join: 5 * time.Minute, Call: time.Minute, Heartbeat: c.lostAfter / 6, LostAfter: c.lostAfter, Revoke: 5 * c.lostAfter, Drain: 10 * c.lostAfter, Backoff: c.lostAfter / 3}
}

func (c simConfig) String() string {
	return fmt.Sprintf("job seed=%d hosts=%d late=%d least=%d local=%d seeds=%d restarts=%d pace=%d latency=%v lost-after=%v calm=%v",
		c.seed, c.hosts, c.late, c.least, c.local, c.seeds, c.restarts, c.pace, c.latency, c.lostAfter, c.calm)
}

// A simFault is a fault that begins some time after the first epoch, or after an event: the n-th proposal or commit, or the end of
// the program. In the sets of hosts, * is the host with the coordinator of the event.
type simFault struct {
	event string // "", "propose", "commit" or "end"
	count int
	after time.Duration
	kind  string
	a, b  string
	d, x  time.Duration
}

func (f simFault) String() string {
	at := "+" + f.after.String()
	if f.event != "" {
		at = f.event + strconv.Itoa(f.count) + at
	}
	none := func(s string) string {
		if s == "" {
			return "-"
		}
		return s
	}
	return fmt.Sprintf("%s %s %s %s %v %v", at, f.kind, none(f.a), none(f.b), f.d, f.x)
}

// A simSchedule is a job and its faults. Its text replays it.
type simSchedule struct {
	simConfig
	faults []simFault
}

func (s simSchedule) String() string {
	lines := []string{s.simConfig.String()}
	for _, f := range s.faults {
		lines = append(lines, f.String())
	}
	return strings.Join(lines, "\n") + "\n"
}

// parseSchedule reads the text of a schedule.
func parseSchedule(text string) (s simSchedule, err error) {
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "job" {
			for _, w := range words[1:] {
				name, value, _ := strings.Cut(w, "=")
				var d time.Duration
				n, e := strconv.Atoi(value)
				if e != nil {
					if d, e = time.ParseDuration(value); e != nil {
						return s, fmt.Errorf("%s: %w", w, e)
					}
				}
				switch name {
				case "seed":
					s.seed = uint64(n)
				case "latency":
					s.latency = d
				case "lost-after":
					s.lostAfter = d
				case "calm":
					s.calm = d
				default:
					field := map[string]*int{"hosts": &s.hosts, "late": &s.late, "least": &s.least, "local": &s.local, "seeds": &s.seeds, "restarts": &s.restarts, "pace": &s.pace}[name]
					if field == nil {
						return s, fmt.Errorf("unknown setting %s", w)
					}
					*field = n
				}
			}
			continue
		}
		f, err := parseFault(words)
		if err != nil {
			return s, fmt.Errorf("%s: %w", strings.TrimSpace(line), err)
		}
		s.faults = append(s.faults, f)
	}
	return s, nil
}

func parseFault(words []string) (f simFault, err error) {
	if len(words) != 6 {
		return f, fmt.Errorf("want 6 words")
	}
	at, after, _ := strings.Cut(words[0], "+")
	if f.event = strings.TrimRight(at, "0123456789"); at != "" {
		if f.count, err = strconv.Atoi(at[len(f.event):]); err != nil {
			return f, err
		}
	}
	for _, p := range []struct {
		to *time.Duration
		s  string
	}{{&f.after, after}, {&f.d, words[4]}, {&f.x, words[5]}} {
		if *p.to, err = time.ParseDuration(p.s); err != nil {
			return f, err
		}
	}
	f.kind, f.a, f.b = words[1], strings.Trim(words[2], "-"), strings.Trim(words[3], "-")
	return f, nil
}

// sets returns the hosts of a set. The complement of a set is written with ^.
func (j *simJob) set(s string, self *simHost) (out []*simHost) {
	j.simNet.mu.Lock()
	defer j.simNet.mu.Unlock()
	s, not := strings.CutPrefix(s, "^")
	for i, h := range j.hosts[:j.cfg.hosts+j.cfg.late] {
		in := strings.Contains(s, simName(i)) || strings.Contains(s, "*") && h.name == self.name
		if in != not {
			out = append(out, j.current(h))
		}
	}
	return out
}

// current returns the machine that has the name of a host now.
func (j *simJob) current(h *simHost) *simHost {
	for _, x := range slices.Backward(j.hosts) {
		if x.name == h.name {
			return x
		}
	}
	return h
}

// apply begins a fault.
func (j *simJob) apply(f simFault, self *simHost) {
	j.mu.Lock()
	calm := j.calm
	j.mu.Unlock()
	if calm {
		return
	}
	j.say("FAULT %v (* is %s)", f, self.name)
	as, bs := j.set(f.a, self), j.set(f.b, self)
	j.touch(f, as, bs)
	paths := func(both bool, do func(p *simPath, from, to *simHost)) func() {
		return func() {
			for _, a := range as {
				for _, b := range bs {
					if a == b {
						continue
					}
					do(j.path(a, b), a, b)
					if both {
						do(j.path(b, a), b, a)
					}
				}
			}
		}
	}
	between := func(do func(c *simConn)) func() {
		return func() {
			for _, c := range j.conns {
				if slices.Contains(as, c.proc.host) && slices.Contains(bs, c.other.proc.host) {
					do(c)
				}
			}
		}
	}
	resets := func(x time.Duration) func() { // x: 0 both ends, 1 those in a, 2 those in b
		return between(func(c *simConn) {
			if x != 2 {
				c.resetHere()
			}
			if x != 1 {
				c.other.resetHere()
			}
		})
	}
	procs := func(do func(p *simProc)) func() {
		return func() {
			for _, a := range as {
				for _, p := range a.procs {
					if launcher := strings.HasPrefix(p.name, "launcher"); f.x == 0 || f.x == 1 && launcher || f.x == 2 && !launcher {
						do(p)
					}
				}
			}
		}
	}
	switch f.kind {
	case "split": // one host after the other
		for i, b := range bs {
			cut := func(n int) func() {
				return func() {
					for _, a := range as {
						if a != b {
							j.path(a, b).cut += n
							j.path(b, a).cut += n
						}
					}
				}
			}
			late := time.Duration(i) * f.x
			if f.d == 0 {
				time.AfterFunc(late, func() { j.during(0, cut(1), cut(-1)) })
			} else if late < f.d { // all end at the same time
				time.AfterFunc(late, func() { j.during(f.d-late, cut(1), cut(-1)) })
			}
		}
	case "cut":
		j.during(f.d, paths(false, func(p *simPath, _, _ *simHost) { p.cut++ }), paths(false, func(p *simPath, _, _ *simHost) { p.cut-- }))
	case "reject":
		j.during(f.d, paths(false, func(p *simPath, _, _ *simHost) { p.reject++ }), paths(false, func(p *simPath, _, _ *simHost) { p.reject-- }))
	case "forge":
		j.during(f.d, paths(false, func(p *simPath, _, _ *simHost) { p.forge++ }), paths(false, func(p *simPath, _, _ *simHost) { p.forge-- }))
	case "delay":
		j.during(f.d, paths(true, func(p *simPath, _, _ *simHost) {
			p.delay += f.x
			j.slowest = max(j.slowest, p.delay)
		}), paths(true, func(p *simPath, _, _ *simHost) { p.delay -= f.x }))
	case "reset":
		j.change(resets(f.x))
	case "firewall": // forgets its connections, and drops packets from then on
		j.during(f.d, func() {
			resets(f.x)()
			paths(true, func(p *simPath, _, _ *simHost) { p.cut++ })()
		}, paths(true, func(p *simPath, _, _ *simHost) { p.cut-- }))
	case "stall":
		var stalled []*simConn
		j.during(f.d, between(func(c *simConn) {
			stalled = append(stalled, c)
			c.stalled++
		}), func() {
			for _, c := range stalled {
				c.stalled--
			}
		})
	case "heal":
		j.heal()
	case "complete": // no fault: the functions return
		j.mu.Lock()
		j.complete = true
		j.mu.Unlock()
	case "stop":
		var stopped []*simProc
		j.during(f.d, procs(func(p *simProc) { p.stopped++; stopped = append(stopped, p) }), func() {
			for _, p := range stopped {
				p.stopped--
			}
		})
	case "starve":
		j.starve(f, procs)
	case "freeze":
		j.during(f.d, func() {
			for _, h := range as {
				h.frozen++
			}
		}, func() {
			for _, h := range as {
				h.frozen--
			}
		})
	case "worker":
		j.mu.Lock()
		ws := slices.Clone(j.workers)
		j.mu.Unlock()
		for _, w := range ws {
			if slices.Contains(as, w.proc.host) && int(f.x)%j.cfg.local == w.local {
				j.mu.Lock()
				j.crashed = j.crashed || w.finished && !w.proc.isDead()
				j.mu.Unlock()
				w.proc.kill(false)
			}
		}
	case "fail":
		j.mu.Lock()
		defer j.mu.Unlock()
		for _, w := range j.workers {
			w.failing = w.failing || slices.Contains(as, w.proc.host) && int(f.x)%j.cfg.local == w.local
		}
	case "kill", "power":
		for _, h := range as {
			if l := j.launcher(h); l != nil {
				l.killAll(f.kind == "power")
			}
			if f.kind == "power" {
				j.change(func() { h.down = true })
			}
			if f.d > 0 {
				time.AfterFunc(f.d, func() {
					j.change(func() { h.down = false })
					j.relaunch(h)
				})
			}
		}
	case "replace": // another machine gets the name of a host, which may live on
		for _, h := range as {
			if f.x == 0 {
				if l := j.launcher(h); l != nil {
					l.killAll(true)
				}
				j.change(func() { h.down = true })
			}
			next := j.addHost(h.name)
			time.AfterFunc(f.d, func() { j.relaunch(next) })
		}
	case "drain":
		for _, h := range as {
			if l := j.launcher(h); l != nil {
				select {
				case l.term <- struct{}{}:
				default:
				}
			}
		}
	case "join":
		for _, h := range as {
			if j.launcher(h) == nil {
				j.relaunch(h)
			}
		}
	}
}

// touch records the hosts that a fault touches: of two sets that are all hosts, the smaller one.
func (j *simJob) touch(f simFault, as, bs []*simHost) {
	j.mu.Lock()
	defer j.mu.Unlock()
	sets := [][]*simHost{as}
	switch {
	case f.kind == "heal" || f.kind == "join" || f.kind == "complete":
		return
	case len(bs) == 0:
	case len(as)+len(bs) < j.cfg.hosts+j.cfg.late, slices.ContainsFunc(as, func(h *simHost) bool { return slices.Contains(bs, h) }):
		sets = [][]*simHost{as, bs}
	case len(as) > len(bs):
		sets = [][]*simHost{bs}
	case len(as) == len(bs):
		sets = [][]*simHost{as, bs}
	}
	for _, h := range slices.Concat(sets...) {
		j.touched[h.name] = true
	}
}

// resetHere ends a connection with a reset at this end only. The caller holds the lock.
func (c *simConn) resetHere() {
	if !c.closed {
		c.reset, c.queue = true, nil
		c.signal()
	}
}

func (j *simJob) launcher(h *simHost) *simLauncher {
	j.mu.Lock()
	defer j.mu.Unlock()
	if l := j.launchers[h.name]; l != nil && l.host == h {
		return l
	}
	return nil
}

// relaunch starts a launcher with a new identity, unless the job is over or the host has a launcher.
func (j *simJob) relaunch(h *simHost) {
	j.mu.Lock()
	l := j.launchers[h.name]
	over := j.over || l != nil && l.host == h && !l.proc.isDead()
	j.mu.Unlock()
	if !over {
		j.launch(h)
	}
}

// during begins a fault that ends after d, or with all others if d is 0.
func (j *simJob) during(d time.Duration, begin, end func()) {
	j.mu.Lock()
	late := j.calm && d == 0 // such as a part of a split
	j.mu.Unlock()
	if late {
		return
	}
	j.change(begin)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lastUndo++
	id := j.lastUndo
	j.undo[id] = end
	if d > 0 {
		time.AfterFunc(d, func() { j.undoFault(id) })
	}
}

func (j *simJob) undoFault(id int) {
	j.mu.Lock()
	end := j.undo[id]
	delete(j.undo, id)
	j.mu.Unlock()
	if end != nil {
		j.change(end)
		j.say("a fault ends")
	}
}

// heal ends all faults.
func (j *simJob) heal() {
	j.mu.Lock()
	var ids []int
	for id := range j.undo {
		ids = append(ids, id)
	}
	j.mu.Unlock()
	for _, id := range ids {
		j.undoFault(id)
	}
}

// starve lets processes run for a few milliseconds now and then.
func (j *simJob) starve(f simFault, procs func(func(*simProc)) func()) {
	end := time.Now().Add(f.d)
	var cycle func()
	cycle = func() {
		j.mu.Lock()
		over := j.over
		j.mu.Unlock()
		if over || !time.Now().Before(end) {
			return
		}
		var stopped []*simProc
		j.during(60*time.Millisecond+time.Duration(mix(j.seed^uint64(time.Until(end)))%300)*time.Millisecond,
			procs(func(p *simProc) { p.stopped++; stopped = append(stopped, p) }), func() {
				for _, p := range stopped {
					p.stopped--
				}
				time.AfterFunc(5*time.Millisecond, cycle)
			})
	}
	cycle()
}

// randomSchedule draws a job and its faults. Half of the faults are aimed at proposals and commits, or at the fault before.
func randomSchedule(seed uint64) simSchedule {
	r := rand.New(rand.NewPCG(seed, 38))
	pick := func(ns ...int) int { return ns[r.IntN(len(ns))] }
	log := func(least, most time.Duration) time.Duration { // log-uniform
		return time.Duration(float64(least) * math.Pow(float64(most)/float64(least), r.Float64())).Round(time.Microsecond)
	}
	s := simSchedule{simConfig: simConfig{seed: seed % 1_000_000_007, hosts: pick(3, 3, 3, 4, 4, 5), least: 1, local: pick(1, 1, 1, 2), seeds: pick(1, 1, 2, 3), restarts: pick(0, 0, 1, 2),
		pace: r.IntN(1 << 20), lostAfter: time.Duration(pick(1, 3)) * time.Second}}
	s.latency = log(50*time.Microsecond, s.lostAfter/250)
	if r.IntN(4) == 0 {
		s.least = 2
	}
	if r.IntN(6) == 0 {
		s.late = 1
	}
	unit := s.lostAfter
	all := "abcdefgh"[:s.hosts]
	anyHost := func() string { return string(all[r.IntN(len(all))]) }
	one := func() string {
		switch r.IntN(5) {
		case 0, 1:
			return "a"
		case 2:
			return "*"
		}
		return anyHost()
	}
	some := func() string {
		if r.IntN(2) == 0 {
			return one()
		}
		var out []byte
		for i := range all {
			if r.IntN(2) == 0 {
				out = append(out, all[i])
			}
		}
		if len(out) == 0 || len(out) == len(all) {
			return one()
		}
		return string(out)
	}
	length := func() time.Duration {
		switch r.IntN(6) {
		case 0:
			return log(unit/100, unit)
		case 1:
			return 0
		case 2: // about the limit of silence
			return time.Duration(float64(unit) * (0.9 + 0.15*r.Float64())).Round(time.Microsecond)
		}
		return log(unit, 4*unit)
	}
	// Each job has a few kinds of faults only, so that a frequent kind does not hide the others.
	kinds := []string{pickString(r, simKinds...), pickString(r, simKinds...), pickString(r, simKinds...)}[r.IntN(3):]
	if r.IntN(4) > 0 {
		kinds = append(kinds, "split")
	}
	last := time.Duration(0)
	for range 1 + r.IntN(5) {
		var f simFault
		switch r.IntN(8) {
		case 0, 1:
			f.event, f.count = "commit", 2+r.IntN(3)
			f.after = log(time.Microsecond, unit/10)
		case 2:
			f.event, f.count = "propose", 1+r.IntN(3)
			f.after = log(time.Microsecond, unit/10)
		case 3, 4:
			f.after = last + log(unit/1000, unit)
			last = f.after
		default:
			f.after = time.Duration(r.Int64N(int64(3 * unit))).Round(time.Millisecond)
			last = f.after
		}
		a := some()
		rest := "^" + a
		if r.IntN(5) == 0 {
			rest = one()
		}
		f.a, f.b = a, rest
		swap := func() {
			if r.IntN(2) == 0 {
				f.a, f.b = f.b, f.a
			}
		}
		f.kind = kinds[r.IntN(len(kinds))]
		switch f.kind {
		case "split":
			if f.d = length(); r.IntN(3) == 0 {
				f.x = log(unit/100, unit/3)
			}
		case "stall":
			f.d = length()
		case "cut", "reject":
			f.d = length()
			swap()
		case "firewall":
			f.d, f.x = length(), time.Duration(r.IntN(3))
		case "reset":
			f.x = time.Duration(r.IntN(3))
		case "delay":
			f.d, f.x = length(), log(time.Millisecond, unit)
		case "heal":
			f.a, f.b = "", ""
		case "stop":
			f.b, f.d, f.x = "", length(), time.Duration(r.IntN(3))
		case "freeze", "starve":
			f.b, f.d = "", log(unit/4, 3*unit)
		case "worker", "fail":
			f.a, f.b, f.x = anyHost(), "", time.Duration(r.IntN(2))
		case "kill", "power":
			f.b = ""
			if r.IntN(2) == 0 {
				f.d = log(unit/100, 2*unit)
			}
		case "replace":
			f.a, f.b, f.d, f.x = one(), "", log(unit/100, 2*unit), time.Duration(r.IntN(2))
		case "join":
			f.a, f.b = simName(s.hosts), ""
		default: // drain
			if f.b = ""; r.IntN(2) == 0 {
				f.a = anyHost()
			}
		}
		s.faults = append(s.faults, f)
		if f.kind == "split" && r.IntN(4) == 0 { // the cut moves
			g := f
			g.event, g.count, g.after = "commit", 2, log(time.Microsecond, 2*s.latency+time.Microsecond)
			h := g
			h.kind, h.a, h.b, h.d = "heal", "", "", 0
			g.after, g.a, g.b, g.d = g.after+time.Microsecond, "*", anyHost(), 0
			s.faults = append(s.faults, h, g)
		}
	}
	complete := r.IntN(3) == 0
	if complete {
		near := s.faults[r.IntN(len(s.faults))]
		f := simFault{event: near.event, count: near.count, after: near.after, kind: "complete"}
		switch r.IntN(4) {
		case 0:
			f.after = time.Duration(r.Int64N(int64(f.after) + 1)) // before it
		case 1:
			f.after += log(unit/100, 3*unit)
		default:
			f.after += log(time.Microsecond, unit/2)
		}
		for range r.IntN(3) { // another fault when all have returned
			g := s.faults[r.IntN(len(s.faults))]
			g.event, g.count, g.after = "end", 1, log(time.Microsecond, unit/2)
			s.faults = append(s.faults, g)
		}
		s.faults = append(s.faults, f)
	}
	early := func(f simFault) bool { return f.event == "" && f.after < unit/5 }
	if (r.IntN(4) == 0 || complete && r.IntN(2) == 0) && !slices.ContainsFunc(s.faults, early) { // agents that do not know of the first epoch end
		s.calm = 4*job.SuccessionTime(unit) + 20*unit
	}
	return s
}

// simKinds are the kinds of faults. The kind "forge" is not among them: a firewall that refuses connections in the name of
// a host that lives proves its end, as far as others can see.
var simKinds = []string{"split", "cut", "firewall", "reject", "reset", "delay", "stall", "heal", "stop", "freeze", "starve", "worker", "worker", "fail", "kill", "power", "replace", "drain", "drain", "join"}

func pickString(r *rand.Rand, list ...string) string { return list[r.IntN(len(list))] }
