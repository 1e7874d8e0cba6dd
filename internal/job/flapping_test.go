package job

import (
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

func TestFlapper(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		f := &flapper{}
		for range FlapLimit - 1 {
			f.ranFor(2*time.Second, time.Second)
			require.False(t, f.isDue())
		}
		f.ranFor(time.Minute, time.Second)
		require.Zero(t, f.inARow, "a good run")
		for range FlapLimit {
			require.False(t, f.isDue())
			f.ranFor(2*time.Second, time.Second)
		}
		const now = instant(time.Hour)
		for _, want := range []time.Duration{30 * time.Second, time.Minute, 2 * time.Minute} {
			require.True(t, f.isDue())
			require.Equal(t, want, f.exclude(now, time.Second))
			require.False(t, f.isDue())
			require.Equal(t, want, f.until-now)
			f.ranFor(0, time.Second)
		}
		for range 100 {
			f.exclude(now, time.Second)
		}
		require.Equal(t, 30*64*time.Second, f.exclude(now, time.Second))
		f.ranFor(time.Hour, time.Second)
		require.False(t, f.isDue())
		require.Zero(t, f.excluded)
	})
}

// A process that its launcher has started when the exclusion was over joins, although the coordinator's clock has stood still
// meanwhile. One that was started before the exclusion began does not.
func TestEndOfAnExclusion(t *testing.T) {
	for waited, want := range map[bool]peerState{true: peerJoined, false: peerGone} {
		j := newPaperJob("a", "b")
		j.cfg.again = restartPolicy{most: 5, backoff: time.Second}
		order := func() { j.elasticExit(j.hosts["b"], Exit{PID: 101, Code: 1}) }
		if !waited {
			j.do(order)
		}
		j.flappers = map[string]*flapper{"b": {until: j.now + time.Minute}}
		if waited {
			j.do(order)
		}
		j.sleep(2 * ExitGrace)
		require.Equal(t, want, j.register("b", 201, 0).state)
	}
}
