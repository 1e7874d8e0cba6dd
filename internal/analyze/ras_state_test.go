package analyze_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/testhost"
)

func decodedRAS(t *testing.T, ranks ...testhost.RASRank) *analyze.RASAnswer {
	t.Helper()
	a, err := analyze.DecodeRAS([]byte(testhost.RASAnswer(ranks...)))
	require.NoError(t, err)
	return a
}

// Each way to hold a job up has its ranks named, and ranks that differ while they go on are not.
func TestCompareRAS(t *testing.T) {
	on := func(pid, allReduces, broadcasts int) testhost.RASRank {
		return testhost.RASRank{Host: "h", PID: pid, AllReduces: allReduces, Broadcasts: broadcasts}
	}
	silent := testhost.RASRank{Host: "h", PID: 2, Silent: true}
	const prefix, suffix = "communicator 0x5c1d8d1a3f0b2c44 of ", "; no rank has launched anything in 3.0 s, and sends and receives do not count"
	for name, c := range map[string]struct {
		before, after []testhost.RASRank
		state, want   string
	}{
		"running":  {[]testhost.RASRank{on(1, 5, 0), on(2, 4, 0)}, []testhost.RASRank{on(1, 9, 0), on(2, 8, 0)}, analyze.Running, ""},
		"idle":     {[]testhost.RASRank{on(1, 5, 0), on(2, 5, 0)}, nil, analyze.Idle, ""},
		"behind":   {[]testhost.RASRank{on(1, 6, 0), on(2, 5, 0), on(3, 6, 0)}, nil, analyze.Stuck, "3 ranks: rank 1 (process 2 on host h) is behind: it has launched 5 AllReduce and not 6 as most other ranks" + suffix},
		"pair":     {[]testhost.RASRank{on(1, 5, 0), on(2, 6, 0)}, nil, analyze.Stuck, "2 ranks: rank 0 (process 1 on host h) is behind: it has launched 5 AllReduce and not 6 as rank 1" + suffix},
		"ahead":    {[]testhost.RASRank{on(1, 5, 0), on(2, 6, 0), on(3, 5, 0)}, nil, analyze.Stuck, "3 ranks: rank 1 (process 2 on host h) is ahead: it has launched 6 AllReduce and not 5 as most other ranks" + suffix},
		"other":    {[]testhost.RASRank{on(1, 6, 0), on(2, 5, 1), on(3, 6, 0)}, nil, analyze.Stuck, "3 ranks: rank 1 (process 2 on host h) is in another operation: it has launched 1 Broadcast and not 0, and 5 AllReduce and not 6 as most other ranks" + suffix},
		"two ways": {[]testhost.RASRank{on(1, 6, 0), on(2, 5, 1)}, nil, analyze.Stuck, "2 ranks: rank 1 (process 2 on host h) is in another operation: it has launched 1 Broadcast and not 0, and 5 AllReduce and not 6 as rank 0, and which of them is wrong is not known" + suffix},
		"silent":   {[]testhost.RASRank{on(1, 6, 0), silent}, nil, analyze.Failing, "2 ranks: rank 1 (process 2 on host h) does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			after := c.after
			if after == nil {
				after = c.before
			}
			s := analyze.CompareRAS("addr", decodedRAS(t, c.before...), decodedRAS(t, after...), 3*time.Second)
			require.Len(t, s.Communicators, 1)
			require.Equal(t, c.state, s.Communicators[0].State)
			require.Len(t, s.Communicators[0].Ranks, len(after))
			if c.want == "" {
				require.Empty(t, s.Findings)
			} else {
				require.Equal(t, []string{prefix + c.want}, s.Findings)
			}
			var text strings.Builder
			require.NoError(t, s.Print(&text))
			require.Contains(t, text.String(), "NCCL 2.29.2+cuda13.0 at addr  1 communicator  compared over 3.0 s\n")
		})
	}
}

// A communicator that a rank has closed meanwhile is not compared with another one of the same hash.
func TestCompareOtherCommunicator(t *testing.T) {
	before, after := decodedRAS(t, testhost.RASRank{PID: 1}, testhost.RASRank{PID: 2}), decodedRAS(t, testhost.RASRank{PID: 1, AllReduces: 3}, testhost.RASRank{PID: 2, AllReduces: 3})
	before.Communicators[0].Secondary = "other"
	s := analyze.CompareRAS("addr", before, after, time.Second)
	require.Equal(t, analyze.Idle, s.Communicators[0].State)
	require.Zero(t, s.Communicators[0].Ranks[0].Grown)
}

// Watch ends with its context between the questions.
func TestWatchEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	addr := testhost.ServeRAS(t, oneRank)
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err := analyze.WatchRAS(ctx, addr, time.Hour)
	require.Error(t, err)
}
