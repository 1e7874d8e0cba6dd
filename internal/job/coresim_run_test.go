package job

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	coreTime  = flag.Duration("coresim", 3*time.Second, "time of TestCoreSimulation")
	coreHosts = flag.Int("corehosts", 3, "hosts of the jobs of TestCoreSearch")
	coreDepth = flag.Int("corefaults", 1, "faults of each job of TestCoreSearch")
	coreEvery = flag.Int("coreevery", 1, "runs one of so many jobs of TestCoreSearch")
	coreSeed  = flag.Uint64("coreseed", 0, "seed of the first job of TestCoreSimulation; 0 means the time")
)

// randomCore draws a job and its faults.
func randomCore(seed uint64) (c coreConfig, calm bool) {
	rng := rand.New(rand.NewPCG(seed, 1))
	c = coreConfig{seed: seed, hosts: 3 + rng.IntN(4), restarts: rng.IntN(4), slow: rng.IntN(2) == 0, lostAfter: 3 * time.Second}
	if rng.IntN(4) == 0 { // longer than the time to answer a proposal
		c.lostAfter *= 3
	}
	kinds := []string{"split", "split", "isolate", "isolate", "mute", "deafen", "cut", "cut", "kill", "crash", "worker", "worker", "power", "pause", "stop", "stall", "drain", "path", "late", "restart"}
	for range 1 + rng.IntN(5) {
		f := coreFault{Kind: kinds[rng.IntN(len(kinds))], A: rng.IntN(c.hosts+1) - 1, B: rng.IntN(c.hosts+1) - 1, After: time.Duration(rng.Int64N(int64(3 * c.lostAfter)))}
		f.D = time.Duration(rng.Int64N(int64(2 * c.lostAfter)))
		if rng.IntN(3) == 0 {
			f.D = time.Hour
		}
		if rng.IntN(2) == 0 { // near a proposal or a commit
			f.Event, f.Count, f.After = []string{"propose", "commit"}[rng.IntN(2)], 1+rng.IntN(4), time.Duration(rng.Int64N(int64(2*time.Millisecond)))
			if rng.IntN(3) == 0 {
				f.After = time.Duration(rng.Int64N(int64(c.lostAfter)))
			}
		}
		if f.Kind == "split" {
			f.B = 1 + rng.IntN(1<<c.hosts-2)
		}
		if n := len(c.faults); n > 0 && rng.IntN(4) == 0 { // when another fault ends
			o := c.faults[n-1]
			f.Event, f.Count, f.After = o.Event, o.Count, o.After+o.D+time.Duration(rng.Int64N(int64(100*time.Millisecond)))-50*time.Millisecond
			f.After = max(f.After, 0)
		}
		c.faults = append(c.faults, f)
	}
	// A coordinator that only hears nobody refuses one host after the other, until it is a minority. The others then do not know that it
	// has given up, and may not be a majority without it. If nobody hears a coordinator, it may lose all
	// workers before the launchers notice, and end the job for want of restarts.
	deaf := slices.ContainsFunc(c.faults, func(f coreFault) bool {
		return slices.Contains([]string{"deafen", "mute", "split", "path"}, f.Kind)
	})
	return c, rng.IntN(4) == 0 && !deaf
}

// shrinkCore deletes faults of a failing job, as long as it fails.
func shrinkCore(c coreConfig, calm bool) coreConfig {
	for i := 0; i < len(c.faults); {
		try := c
		if try.faults = slices.Delete(slices.Clone(c.faults), i, i+1); simulateCore(try, false, calm).violation != "" {
			c, i = try, 0
		} else {
			i++
		}
	}
	return c
}

// runCores runs jobs of a sequence side by side, until it ends or a job fails, and returns the number of jobs and of their epochs.
func runCores(t *testing.T, next func(i uint64) (c coreConfig, calm, ok bool)) (jobs, commits int64) {
	t.Helper()
	var last atomic.Uint64
	var ran, begun atomic.Int64
	var failed atomic.Pointer[func() string]
	var all sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for failed.Load() == nil {
				c, calm, ok := next(last.Add(1) - 1)
				if !ok {
					return
				}
				s := simulateCore(c, false, calm)
				ran.Add(1)
				begun.Add(int64(len(s.commits)))
				if s.violation != "" {
					failed.CompareAndSwap(nil, new(func() string {
						c = shrinkCore(c, calm)
						s := simulateCore(c, true, calm)
						return fmt.Sprintf("%s\n%v, calm: %v\n%s", s.violation, c, calm, strings.Join(s.log, "\n"))
					}))
				}
			}
		})
	}
	all.Wait()
	if why := failed.Load(); why != nil {
		require.FailNow(t, (*why)())
	}
	return ran.Load(), begun.Load()
}

// TestCoreSimulation runs random jobs of coordinators and voters.
func TestCoreSimulation(t *testing.T) {
	seed, begin := *coreSeed, time.Now()
	if seed == 0 {
		seed = uint64(begin.UnixNano())
	}
	jobs, commits := runCores(t, func(i uint64) (coreConfig, bool, bool) {
		c, calm := randomCore(seed + i)
		return c, calm, time.Since(begin) < *coreTime
	})
	t.Logf("seed %d: %d jobs with %d epochs in %v", seed, jobs, commits, time.Since(begin))
}

// The faults of TestCoreSearch begin at one of these events.
var coreMoments = []coreFault{
	{Event: "commit", Count: 1, After: time.Second}, {Event: "commit", Count: 1, After: 2 * time.Second},
	{Event: "propose", Count: 1}, {Event: "propose", Count: 1, After: 300 * time.Microsecond}, {Event: "propose", Count: 1, After: 700 * time.Microsecond},
	{Event: "commit", Count: 2}, {Event: "commit", Count: 2, After: 300 * time.Microsecond}, {Event: "commit", Count: 2, After: time.Second},
	{Event: "propose", Count: 2}, {Event: "propose", Count: 2, After: 500 * time.Microsecond}, {Event: "commit", Count: 3},
}

// coreFaults returns all single faults of a job of n hosts.
func coreFaults(n int) (all []coreFault) {
	for _, m := range coreMoments {
		for h := range n {
			add := func(f coreFault) {
				f.A, f.D = h, 4*time.Second
				all = append(all, f)
			}
			for _, kind := range []string{"isolate", "mute", "deafen", "kill", "crash", "worker", "pause", "stop", "stall", "drain", "path", "late", "restart"} {
				if m.Kind = kind; h > 1 || kind != "late" && kind != "restart" { // the others are seeds
					add(m)
				}
			}
			for g := range h {
				m.Kind, m.B = "cut", g
				add(m)
				if m.Kind, m.B = "split", 1<<h|1<<g; n > 3 {
					add(m)
				}
			}
			m.B = 0
		}
	}
	return all
}

// coreOpenings are the faults with which the jobs of TestCoreSearch begin. Without one, nothing is proposed.
var coreOpenings = [][]coreFault{
	{{Event: "commit", Count: 1, After: 2 * time.Second, Kind: "worker", A: 1}},
	// The next coordinator goes on with half of the hosts. The others, from the fourth or the last of three on, register during its
	// proposal, which a worker delays.
	{{Event: "commit", Count: 1, After: time.Second, Kind: "kill"}, {Event: "commit", Count: 1, After: time.Second, Kind: "split", B: 6 | 0b11111000<<8, D: time.Second},
		{Event: "commit", Count: 1, After: time.Second, Kind: "cut", A: 1, B: 2, D: time.Second}, {Event: "propose", Count: 1, Kind: "stall", A: 1, D: 2500 * time.Millisecond}},
	// The coordinator hears a host, and gives it up for another reason, of which the host does not learn.
	{{Event: "commit", Count: 1, After: time.Second, Kind: "deafen", A: 1, D: time.Second}, {Event: "commit", Count: 1, After: time.Second + time.Millisecond, Kind: "path", A: 1, B: 2}},
}

// coreOpening returns the faults of an opening for a job of n hosts.
func coreOpening(i, n int) []coreFault {
	return without(coreOpenings[i], func(f coreFault) bool { return n > 3 && f.Kind == "cut" }) // only the smallest job splits there
}

// TestCoreSearch runs all jobs of three hosts with some faults, each of all kinds at all of some moments: none may have two
// coordinators that go on. -corefaults and -corehosts extend the search.
func TestCoreSearch(t *testing.T) {
	single := coreFaults(*coreHosts)
	var mu sync.Mutex
	set := make([]int, *coreDepth) // indices of faults, none smaller than the one before
	more := true
	begin := time.Now()
	opening := 0
	jobs, commits := runCores(t, func(uint64) (c coreConfig, calm, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		c = coreConfig{seed: 1, hosts: *coreHosts, restarts: 2, lostAfter: 3 * time.Second}
		c.faults = append(c.faults, coreOpening(opening, c.hosts)...)
		if opening = (opening + 1) % len(coreOpenings); opening > 0 {
			for _, f := range set {
				c.faults = append(c.faults, single[f])
			}
			return c, false, more
		}
		for _, f := range set {
			c.faults = append(c.faults, single[f])
		}
		ok = more
		for range *coreEvery {
			more = false
			for i := len(set) - 1; i >= 0 && !more; i-- { // the next set
				if more = set[i]+1 < len(single); more {
					set[i]++
					for k := range set[i+1:] {
						set[i+1+k] = set[i]
					}
				}
			}
		}
		return c, false, ok
	})
	t.Logf("%d jobs of %d hosts with %d of %d faults, with %d epochs, in %v", jobs, *coreHosts, *coreDepth, len(single), commits, time.Since(begin))
}

// The same job has the same events, whatever the scheduler and the order of maps do.
func TestCoreReplay(t *testing.T) {
	for seed := range uint64(100) {
		c, calm := randomCore(seed)
		require.Equal(t, simulateCore(c, true, calm).log, simulateCore(c, true, calm).log, "seed %d", seed)
	}
}

// live checks that two epochs are not alive for long: all their members work, and their coordinator runs.
func (s *coreSim) live() (out []*coreCommit) {
	for _, c := range s.commits {
		running := 0
		for w := range c.workers {
			if w.proc.paused == 0 && !w.proc.dead {
				running++
			}
		}
		if running == len(c.members) && !c.by.agent.proc.dead && c.by.agent.proc.paused == 0 && !c.by.closed && !c.by.c.handedOver {
			out = append(out, c)
		}
	}
	return out
}

// watch checks now and then.
func (s *coreSim) watch() {
	if live := s.live(); len(live) < 2 {
		s.bothSince = s.now
	} else if s.now-s.bothSince > s.lostAfter {
		s.violate("two epochs are alive: %d of %v by %s, and %d of %v by %s", live[0].epoch, live[0].members, live[0].by.agent.uuid, live[1].epoch, live[1].members, live[1].by.agent.uuid)
	}
	s.after(250*time.Millisecond, s.watch)
}

// trigger begins faults after an event.
func (s *coreSim) trigger(event string, count, host int) {
	for _, f := range s.faults {
		if f.Event == event && f.Count == count || f.Event == "" && event == "commit" && count == 1 {
			s.after(f.After+1, func() { s.apply(f, host) })
		}
	}
}

// apply begins a fault, and ends it after its duration.
func (s *coreSim) apply(f coreFault, host int) {
	h, g := f.A, f.B
	if h < 0 {
		h = host
	}
	if g < 0 || g >= s.hosts {
		g = host
	}
	a := s.agents[h]
	if s.healed || !a.started && f.Kind != "late" { // it was planned for a time after the end of all faults
		return
	}
	s.say("fault: %s %s %d for %v", f.Kind, s.agents[h].uuid, f.B, f.D)
	s.touched[h] = true
	cut := func(pairs ...[2]int) {
		for _, p := range pairs {
			s.cuts[p[0]][p[1]]++
		}
		s.changed()
		s.after(f.D, func() {
			for _, p := range pairs {
				if !s.healed {
					s.cuts[p[0]][p[1]]--
				}
			}
			s.changed()
		})
	}
	var in, out [][2]int
	for o := range s.agents {
		if o != h {
			in, out = append(in, [2]int{o, h}), append(out, [2]int{h, o})
		}
	}
	switch f.Kind {
	case "isolate":
		cut(append(in, out...)...)
	case "mute":
		cut(out...)
	case "deafen":
		cut(in...)
	case "split": // the hosts of the bits of B from those of B>>8, or from all others
		one, other := f.B&0xff, f.B>>8
		if other == 0 {
			other = ^one
		}
		var pairs [][2]int
		for i := range s.agents {
			for o := range s.agents {
				if one>>i&1 == 1 && other>>o&1 == 1 {
					pairs = append(pairs, [2]int{i, o}, [2]int{o, i})
					s.touched[i], s.touched[o] = true, true
				}
			}
		}
		cut(pairs...)
	case "cut":
		if g != h {
			s.touched[g] = true
			cut([2]int{h, g}, [2]int{g, h})
		}
	case "kill":
		a.kill()
	case "crash":
		for _, l := range s.links {
			for end, p := range l.procs {
				if p == a.proc {
					l.queue[1-end] = nil
				}
			}
		}
		a.kill()
	case "path":
		if from := s.agents[g]; g != h && from.link != nil {
			from.link.send(coreServed, &msg{kind: kindPath, epoch: FirstEpoch, rec: &record{value: &pathReport{UUID: a.uuid, Before: true}}})
		}
	case "late":
		a.start()
	case "restart":
		if h < 2 { // seeds that start again need the warnings of others
			return
		}
		a.kill()
		s.past = append(s.past, a)
		s.agents[h] = s.newAgent(h, fmt.Sprint(a.uuid, len(s.past)))
		s.after(s.random(100*time.Millisecond), s.agents[h].start)
	case "worker":
		if a.worker != nil {
			a.worker.exit(137)
		}
	case "power":
		s.down[h] = true
		a.proc.dead = true
		if w := a.worker; w != nil {
			w.stops()
			w.now = nil
			w.proc.dead = true
		}
		s.changed()
	case "pause", "stop", "stall":
		var ps []*coreProc
		if f.Kind != "stall" {
			ps = append(ps, a.proc)
		}
		if w := a.worker; f.Kind != "stop" && w != nil {
			ps = append(ps, w.proc)
		}
		for _, p := range ps {
			p.pause()
		}
		s.after(f.D, func() {
			for _, p := range ps {
				if p.paused > 0 {
					p.resume()
				}
			}
		})
	case "drain":
		a.proc.do(func() {
			if a.history == nil || a.over || a.ended != "" || a.drains != nil {
				return
			}
			x := Fault{Reason: "received SIGTERM", Code: 143}
			a.drains, a.drained = &x, true
			if a.link != nil {
				a.link.send(coreServed, &msg{kind: kindDrain, epoch: FirstEpoch, rec: &record{value: &x}})
			}
		})
	}
}

// newCoreSim starts a job.
func newCoreSim(cfg coreConfig) *coreSim {
	s := &coreSim{coreConfig: cfg, rng: rand.New(rand.NewPCG(cfg.seed, 7)), now: 1, down: make([]bool, cfg.hosts), touched: map[int]bool{}}
	for i := range cfg.hosts {
		s.cuts = append(s.cuts, make([]int, cfg.hosts))
		s.agents = append(s.agents, s.newAgent(i, simName(i)))
	}
	for i, a := range s.agents {
		at := s.random(100 * time.Millisecond)
		if !slices.ContainsFunc(cfg.faults, func(f coreFault) bool { return f.Kind == "late" && f.A == i && i > 1 }) {
			s.after(at, a.start)
		}
	}
	s.watch()
	return s
}

func (s *coreSim) newAgent(host int, uuid string) *coreAgent {
	return &coreAgent{voter: newVoter(1), s: s, uuid: uuid, addr: simName(host), proc: &coreProc{s: s, host: host, name: "launcher " + uuid, dead: true}}
}

// start starts a launcher. Until then, nobody answers at its address.
func (a *coreAgent) start() {
	if a.started {
		return
	}
	a.started, a.proc.dead, a.proc.missed = true, false, 0
	self := ""
	if a.isSeed() {
		a.serve(nil)
		self = a.addr
	}
	a.startChoice(newChoice(&a.voter, []string{simName(0), simName(1)}, self, a.proc.clock()))
}

// simulateCore runs a job and returns what has gone wrong. If calm is true, the job must have settled a while after the faults.
func simulateCore(cfg coreConfig, logs, calm bool) *coreSim {
	s := newCoreSim(cfg)
	s.logs = logs
	s.run(2 * time.Second)
	for range 10 { // fewer hosts begin when no other comes for a while
		if len(s.commits) == 0 {
			s.run(time.Second)
		}
	}
	if len(s.commits) == 0 {
		s.violate("the job did not start")
	}
	s.run(6 * s.lostAfter)
	for i := range s.cuts {
		clear(s.cuts[i])
	}
	s.healed, s.faults = true, nil
	s.changed()
	for _, a := range append(s.past, s.agents...) {
		for _, p := range append([]*coreProc{a.proc}, a.procs...) {
			for p.paused > 0 {
				p.resume()
			}
		}
	}
	if calm && s.violation == "" {
		s.run(8*s.lostAfter + 30*time.Second)
		s.settles()
	}
	return s
}

// untouched returns how many of the hosts no fault has touched.
func (s *coreSim) untouched(hosts voterSet) (n int) {
	for i, a := range s.agents {
		if !s.touched[i] && slices.Contains(hosts, a.uuid) {
			n++
		}
	}
	return n
}

// settles checks that each launcher belongs to the epoch that is alive, or has ended, and that the job goes on if faults have touched
// only a minority. It may go on without hosts that have lost the coordinator only for themselves.
func (s *coreSim) settles() {
	live := s.live()
	for _, a := range s.agents {
		if r := a.srv; len(live) == 0 && r != nil && !a.proc.dead && r.c.isElastic() && r.c.elastic.phase == phaseWait {
			return // for processes
		}
		if strings.Contains(a.ended, "not enough processes") {
			return // no restarts are left
		}
		if a.history == nil {
			return // before a host knows of the first epoch, the job ends there with its coordinator
		}
		if a.ended == errNoMajority.Error() && len(a.history.open(a.history.Epoch)) > 0 {
			// The coordinator has proposed an epoch, and failed. The epoch may have begun, and half of its hosts without the
			// first one may not go on. Hosts that had given this coordinator up before do not know of it.
			return
		}
		if a.ended == errNoMajority.Error() && 2*s.untouched(a.history.Voters) <= len(a.history.Voters) {
			return // the last epoch began without hosts that had given its coordinator up, and then faults touched half of it
		}
	}
	left := 0
	for i := range s.agents {
		if !s.touched[i] {
			left++
		}
	}
	for i, a := range s.agents {
		gone := a.proc.dead || a.ended != ""
		switch {
		case s.violation != "":
		case left > s.hosts/2 && !s.touched[i] && gone && len(live) == 0:
			s.violate("no fault has touched a majority of the hosts, and %s has ended: %s", a.proc.name, a.ended)
		case gone:
		case len(live) == 0:
			s.violate("%s has not ended, and no epoch is alive", a.proc.name)
		case a.choosing || a.link == nil || a.link.server != live[0].by:
			s.violate("%s has not ended, and does not follow %s", a.proc.name, live[0].by.agent.uuid)
		}
	}
}
