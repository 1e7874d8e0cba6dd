package cluster

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
	coreSeed  = flag.Uint64("coreseed", 0, "seed of the first job of TestCoreSimulation; 0 means the time")
)

// randomCore draws a job and its faults.
func randomCore(seed uint64) (c coreConfig, calm bool) {
	rng := rand.New(rand.NewPCG(seed, 1))
	c = coreConfig{seed: seed, hosts: 3 + rng.IntN(4), restarts: rng.IntN(4), slow: rng.IntN(2) == 0, lostAfter: 3 * time.Second}
	kinds := []string{"split", "isolate", "isolate", "mute", "deafen", "cut", "cut", "kill", "worker", "worker", "power", "pause", "stop", "drain"}
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
	// has given up, and may not be a majority without it.
	deaf := slices.ContainsFunc(c.faults, func(f coreFault) bool { return f.Kind == "deafen" || f.Kind == "split" })
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
			for _, kind := range []string{"isolate", "mute", "deafen", "kill", "worker", "pause", "stop", "drain"} {
				f := m
				f.Kind, f.A, f.D = kind, h, 4*time.Second
				all = append(all, f)
			}
			for g := range h {
				f := m
				f.Kind, f.A, f.B, f.D = "cut", h, g, 4*time.Second
				all = append(all, f)
			}
		}
	}
	return all
}

// TestCoreSearch runs all jobs of three hosts with some faults, each of all kinds at all of some moments: none may have two
// coordinators that go on. -corefaults and -corehosts extend the search.
func TestCoreSearch(t *testing.T) {
	single := coreFaults(*coreHosts)
	var mu sync.Mutex
	set := make([]int, *coreDepth) // indices of faults, none smaller than the one before
	more := true
	begin := time.Now()
	jobs, commits := runCores(t, func(uint64) (c coreConfig, calm, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		c = coreConfig{seed: 1, hosts: *coreHosts, restarts: 2, lostAfter: 3 * time.Second}
		// Without the loss of a worker, nothing is proposed.
		c.faults = append(c.faults, coreFault{Event: "commit", Count: 1, After: 2 * time.Second, Kind: "worker", A: 1})
		for _, f := range set {
			c.faults = append(c.faults, single[f])
		}
		ok, more = more, false
		for i := len(set) - 1; i >= 0 && !more; i-- { // the next set
			if more = set[i]+1 < len(single); more {
				set[i]++
				for k := range set[i+1:] {
					set[i+1+k] = set[i]
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
