package cluster

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// gang joins processes that know only a list of peers.
func gang(t *testing.T, timing Timing, peers [][]string, ranks ...int) (errs []error) {
	errs = make([]error, len(ranks))
	sessions := make([]*Session, len(ranks))
	var wg sync.WaitGroup
	for i, rank := range ranks {
		wg.Go(func() {
			sessions[i], errs[i] = Join(t.Context(), &JoinConfig{Job: "gang", Peers: peers[i], Rank: &rank, Secret: testSecret, Timing: timing, Notify: func(string) {}})
		})
	}
	wg.Wait()
	for i, s := range sessions {
		if errs[i] == nil && len(ranks) == s.Size() {
			require.Equal(t, ranks[i], s.Rank())
			wg.Go(func() { errs[i] = s.Shutdown(t.Context()) })
		}
	}
	wg.Wait()
	for _, s := range sessions {
		if s != nil {
			s.Close()
		}
	}
	return errs
}

func TestPeers(t *testing.T) {
	list := []string{freeAddr(t), "10.0.0.2:1", "c"} // only the first one is dialed
	for _, err := range gang(t, quick, [][]string{list, list, list}, 2, 0, 1) {
		require.NoError(t, err)
	}
}

// Those who wait learn which peers did not come, and who came with other settings.
func TestPeersWhoDoNotCome(t *testing.T) {
	list := []string{freeAddr(t), "b:29500", "c:29500", "d:29500"}
	other := []string{list[0], "c:29500", "b:29500", "d:29500"}
	t.Parallel() // it waits for the limit, which a busy machine must not reach before the others have come
	limited := quick
	limited.Join = 12 * time.Second
	errs := gang(t, limited, [][]string{list, list, other}, 0, 1, 3)
	for _, err := range errs[:2] {
		e, ok := errors.AsType[*JoinTimeoutError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, []int{2, 3}, e.Missing)
		require.ErrorContains(t, err, "these peers did not come: c:29500, d:29500")
		require.ErrorContains(t, err, "refused: rank 3 (")
		require.ErrorContains(t, err, "another list of peers")
	}
	require.ErrorContains(t, errs[2], "another list of peers than the coordinator")
}

// Run names them, too.
func TestPeersWhoDoNotCallRun(t *testing.T) {
	t.Parallel() // as above
	limited := quick
	limited.Join = 5 * time.Second
	err := Run(t.Context(), &RunConfig{Join: &JoinConfig{Job: "gang", Peers: []string{freeAddr(t), "b:29500"}, Rank: new(0), Secret: testSecret, Timing: limited, Notify: func(string) {}}},
		func(context.Context, *World) error { return nil })
	e, ok := errors.AsType[*JoinTimeoutError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []int{1}, e.Missing)
	require.ErrorContains(t, err, "these peers did not come: b:29500")
}

func TestBadPeers(t *testing.T) {
	rank := func(r int) *int { return &r }
	for want, cfg := range map[string]*JoinConfig{
		"the list of peers is empty": {Peers: []string{}, Rank: rank(0)},
		"contradict each other":      {Peers: []string{"a:1", "b"}, Rank: rank(0), Addr: "a:1"},
		"Size 3, ":                   {Peers: []string{"a:1", "b"}, Rank: rank(0), Size: 3},
		"2 peers and no Rank":        {Peers: []string{"a:1", "b"}},
		"Rank is 2: want the index of this process in a list of 2": {Peers: []string{"a:1", "b"}, Rank: rank(2)},
		`peer 0 is "a": want host:port`:                            {Peers: []string{"a", "b"}, Rank: rank(0)},
		`peer 1 is "": want an address`:                            {Peers: []string{"a:1", ""}, Rank: rank(0)},
		"peers 1 and 2 are both b":                                 {Peers: []string{"a:1", "b", "b"}, Rank: rank(0)},
		"no secret for the coordinator at 10.0.0.1:29500":          {Peers: []string{"10.0.0.1:29500", "b"}, Rank: rank(0)},
		"5 bytes of secret: want at least 16":                      {Peers: []string{"10.0.0.1:29500", "b"}, Rank: rank(0), Secret: []byte("short")},
	} {
		_, err := Join(t.Context(), cfg)
		_, ok := errors.AsType[*ConfigError](err)
		require.True(t, ok, "%v", err)
		require.ErrorContains(t, err, want)
	}
}
