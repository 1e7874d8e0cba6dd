package cluster

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

var (
	simTime   = flag.Duration("simulate", 10*time.Second, "time of TestSimulation")
	simSeed   = flag.Uint64("simseed", 0, "seed of the first job of TestSimulation; 0 means the time")
	simReplay = flag.String("simreplay", "", "file with a schedule that TestSimulation replays, with all events")
	simKeep   = flag.String("simkeep", "", "folder in which TestSimulation writes failing schedules, and goes on")
)

// A simResult is what a simulated job has done.
type simResult struct {
	violation string
	events    []string
	commits   int
	begun     []time.Time // the epochs of the first job
	virtual   time.Duration
}

// simulate runs a schedule.
func simulate(t *testing.T, s simSchedule) (r simResult) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newSimJob(s.simConfig, s.faults)
		for i, h := range j.hosts[:s.hosts] {
			time.AfterFunc(time.Duration(mix(s.seed+uint64(i))%600_000_000), func() { j.relaunch(h) })
		}
		ctx, cancel := context.WithCancel(t.Context())
		watched := make(chan struct{})
		go func() { defer close(watched); j.watch(ctx) }()
		select {
		case <-j.began:
			select {
			case <-time.After(6 * s.lostAfter):
			case <-j.violated:
			}
		case <-time.After(time.Minute):
			j.mu.Lock()
			j.violate("the job did not start")
			j.mu.Unlock()
		}
		j.mu.Lock()
		j.calm = true
		j.mu.Unlock()
		j.heal()
		why := ""
		for end := time.Now().Add(s.calm); s.calm > 0 && !j.hasFailed(); {
			if why = j.settles(); why == "" || time.Now().After(end) {
				break
			}
			time.Sleep(time.Second)
		}
		j.mu.Lock()
		if why != "" {
			j.violate("%s", why)
		}
		j.mu.Unlock()
		j.mu.Lock()
		j.over = true
		r.virtual = time.Since(j.begin)
		r.violation, r.events = j.violation, slices.Clone(j.events)
		if j.first != nil {
			r.commits = len(j.first.commits)
			for _, c := range j.first.commits {
				r.begun = append(r.begun, c.at)
			}
		}
		j.mu.Unlock()
		cancel()
		<-watched
		j.heal()
		j.stop()
	})
	return r
}

// fails runs a schedule up to n times and returns the first result with a violation.
func fails(t *testing.T, s simSchedule, n int) (simResult, bool) {
	for range n {
		if r := simulate(t, s); r.violation != "" {
			return r, true
		}
	}
	return simResult{}, false
}

// shrink deletes faults of a failing schedule, as long as it fails.
func shrink(t *testing.T, s simSchedule) simSchedule {
	for again := true; again; {
		again = false
		for i := range s.faults {
			try := s
			try.faults = slices.Delete(slices.Clone(s.faults), i, i+1)
			if _, bad := fails(t, try, 2); bad {
				s, again = try, true
				break
			}
		}
	}
	return s
}

// TestSimulation runs random jobs of the real code on a simulated network.
func TestSimulation(t *testing.T) {
	if *simReplay != "" {
		text, err := os.ReadFile(*simReplay)
		require.NoError(t, err)
		s, err := parseSchedule(string(text))
		require.NoError(t, err)
		r := simulate(t, s)
		t.Logf("%s\n%s", s, strings.Join(r.events, "\n"))
		require.Empty(t, r.violation)
		return
	}
	seed := *simSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	begun, jobs, commits, virtual, bad := time.Now(), 0, 0, time.Duration(0), 0
	for ; time.Since(begun) < *simTime; jobs++ {
		s := randomSchedule(seed + uint64(jobs))
		r := simulate(t, s)
		commits += r.commits
		virtual += r.virtual
		if r.violation == "" {
			continue
		}
		bad++
		if *simKeep == "" {
			s = shrink(t, s)
			if again, fails := fails(t, s, 3); fails {
				r = again
			}
			require.FailNow(t, r.violation, "seed %d\n%s\n%s", seed+uint64(jobs), s, strings.Join(r.events, "\n"))
		}
		s = shrink(t, s)
		again, repeats := fails(t, s, 3)
		if repeats {
			r = again
		}
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s/%d.txt", *simKeep, seed+uint64(jobs)), []byte(s.String()), 0o644))
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s/%d.log", *simKeep, seed+uint64(jobs)), []byte(r.violation+"\n"+s.String()+strings.Join(r.events, "\n")), 0o644))
	}
	t.Logf("seed %d: %d jobs with %d epochs and %v of virtual time in %v; %d failed", seed, jobs, commits, virtual, time.Since(begun), bad)
}

// Hosts vanish, the coordinator among them, with up to 14 of the next candidates. The other hosts go on within 3.5 s, or 1.5 s
// with the limits of the fast profile, in virtual time, which no other work of this machine changes.
func TestVanishedHostsCostLittleTime(t *testing.T) {
	for _, limit := range []struct{ lostAfter, next time.Duration }{{3 * time.Second, 3500 * time.Millisecond}, {time.Second, 1500 * time.Millisecond}} {
		for _, c := range []struct {
			hosts  int
			vanish string
		}{{5, "a"}, {5, "ab"}, {5, "ad"}, {5, "de"}, {31, "aABCDEbcdefghij"}, {31, "abcdefghijklmno"}} {
			t.Run(fmt.Sprintf("%v/%s of %d", limit.lostAfter, c.vanish, c.hosts), func(t *testing.T) {
				s := simSchedule{simConfig: simConfig{seed: 1, hosts: c.hosts, least: 1, local: 1, seeds: 1, pace: -1, latency: 200 * time.Microsecond, lostAfter: limit.lostAfter},
					faults: []simFault{{event: "commit", count: 1, after: 2100 * time.Millisecond, kind: "power", a: c.vanish}}}
				r := simulate(t, s)
				require.Empty(t, r.violation)
				require.Greater(t, len(r.begun), 1, strings.Join(r.events, "\n"))
				took := r.begun[1].Sub(r.begun[0]) - s.faults[0].after
				t.Logf("the next epoch begins after %v", took)
				require.Less(t, took, limit.next, strings.Join(r.events, "\n"))
			})
		}
	}
}
