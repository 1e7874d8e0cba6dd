package cluster

import (
	"errors"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	starts       = flag.Int("starts", 2, "how often TestStarts starts its job")
	startedHosts = flag.Int("started", 8, "hosts of TestStarts")
)

// TestStarts starts a job on many hosts again and again, over real connections: all hosts meet through
// three seeds and gossip, their workers form one world and finish, and the hosts leave.
func TestStarts(t *testing.T) {
	t.Parallel()
	for i := range *starts {
		begun := time.Now()
		cfgs := onLoopback(t, *startedHosts, 3)
		for _, c := range cfgs {
			c.LocalSize, c.Timing.Join = 1, 5*time.Minute
		}
		as, errs := startAll(t, cfgs...)
		require.NoError(t, errors.Join(errs...), "start %d", i)
		met := time.Since(begun)
		var rs []*ran
		for _, a := range as {
			rs = append(rs, runWorker(t, a, 0, RunConfig{}))
		}
		for rank, r := range rs {
			w := r.world(t, 1)
			require.Equal(t, []int{rank, len(rs)}, []int{w.Rank(), w.Size()}, "start %d", i)
		}
		finishAll(t, as, rs...)
		var all sync.WaitGroup
		for _, a := range as {
			all.Go(func() { a.Close() })
		}
		all.Wait()
		t.Logf("start %d: %d hosts have met after %v, and left after %v", i, len(as), met, time.Since(begun))
	}
}
