package cluster

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/status"
)

// TestStatus asks for the status of a job on two hosts from both agents.
func TestStatus(t *testing.T) {
	as, errs := startAll(t, onLoopback(t, 2, 1)...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	before, err := as[1].Status(t.Context())
	require.NoError(t, err)
	require.Len(t, before.Members, 3)
	for rank, m := range before.Members {
		require.Equal(t, rank, m.Rank)
		require.Equal(t, "joining", m.State)
		require.Equal(t, "it has not attached to the job yet", m.Missing)
	}
	remove := status.Add("test", func(p *status.Process) { p.Notes = append(p.Notes, "here") })
	defer remove()
	ss := attachAll(t, as...)
	for _, a := range as {
		s, err := a.Status(t.Context())
		require.NoError(t, err)
		require.Equal(t, t.Name(), s.Job)
		require.Equal(t, 1, s.Epoch)
		require.Equal(t, []string{"n9", "n10"}, s.Hosts)
		require.Len(t, s.Members, 3)
		for rank, m := range s.Members {
			require.Equal(t, ss[rank].Members()[rank], m.Member)
			require.Equal(t, "running", m.State)
			p, err := status.Decode(m.Report)
			require.NoError(t, err, "%s", m.Missing)
			require.Equal(t, []string{"here"}, p.Notes)
		}
	}
}
