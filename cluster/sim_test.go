package cluster

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
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
	virtual   time.Duration
}

// simulate runs a schedule.
func simulate(t *testing.T, s simSchedule) (r simResult) {
	synctest.Test(t, func(t *testing.T) {
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
