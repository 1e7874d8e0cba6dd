package job

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Nobody hears the coordinator, it hears nobody, or both: the other hosts go on with another coordinator, although the
// cut never ends.
func TestMajorityGoesOnWithoutTheCoordinator(t *testing.T) {
	const lostAfter = 3 * time.Second
	for kind, limit := range map[string]time.Duration{
		"mute": lostAfter + lostAfter/6, "isolate": lostAfter + lostAfter/6, // the others notice at once
		"deafen": 2*lostAfter + lostAfter/6, // the coordinator notices first, and then the others notice its end
	} {
		var most time.Duration
		for hosts := 3; hosts <= 6; hosts++ {
			for seed := range uint64(50) {
				after := time.Second + time.Duration(seed)*17*time.Millisecond
				f := coreFault{Event: "commit", Count: 1, After: after, Kind: kind, A: -1, D: 24 * time.Hour}
				s := newCoreSim(coreConfig{seed: seed, hosts: hosts, lostAfter: lostAfter, faults: []coreFault{f}})
				for s.violation == "" && len(s.commits) == 0 && s.now < time.Minute {
					s.run(10 * time.Millisecond)
				}
				require.Empty(t, s.violation, "seed %d", seed)
				require.Len(t, s.commits, 1, "seed %d", seed)
				first, goesOn := s.commits[0], false
				begin := s.now
				for s.violation == "" && !goesOn && s.now < begin+time.Minute {
					s.run(50 * time.Millisecond)
					live := s.live()
					goesOn = len(live) == 1 && live[0].by != first.by && len(live[0].hosts) == hosts-1
				}
				require.Empty(t, s.violation, "%s, %d hosts, seed %d", kind, hosts, seed)
				require.True(t, goesOn, "%s, %d hosts, seed %d: %d epochs, %d live", kind, hosts, seed, len(s.commits), len(s.live()))
				most = max(most, s.now-begin-after)
			}
		}
		require.LessOrEqual(t, most, limit, "of simulated time")
		t.Logf("%s: the others work in their next epoch at most %v after the cut", kind, most)
	}
}

// Schedules of faults that have found mistakes in decisions.
func TestCoreSchedules(t *testing.T) {
	for name, c := range map[string]coreConfig{
		"a host that registered between proposal and begin counted the end of the coordinator": {seed: 1, hosts: 3, restarts: 2, lostAfter: 3 * time.Second, faults: append(coreOpening(1, 3),
			coreFault{Event: "commit", Count: 2, Kind: "crash", A: 1})},
		"hosts that came late counted the end of a coordinator that had agreed to an epoch without them": {seed: 0x18ec50d194e037a5, hosts: 6, restarts: 3, lostAfter: 3 * time.Second, faults: []coreFault{
			{Event: "commit", Count: 2, After: 16827, Kind: "deafen", A: 1, B: -1, D: 5245472727}, {After: 222224137, Kind: "split", A: -1, B: 7, D: 3221125095},
			{After: 3485529571, Kind: "stop", A: 2, B: 2, D: 5103793010}, {After: 8595034318, Kind: "isolate", A: 2, B: 4, D: time.Hour}}},
	} {
		require.Empty(t, simulateCore(c, false, false).violation, name)
	}
}
