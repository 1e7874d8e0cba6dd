package cluster

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
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
	notes := func(m *job.MemberStatus) []string {
		p, err := status.Decode(m.Report)
		if err != nil {
			return []string{m.Missing}
		}
		return p.Notes
	}
	for _, a := range as {
		var s *job.Status
		require.Eventually(t, func() bool { // a process that a busy machine stops for a part of a second has no report
			var err error
			s, err = a.Status(t.Context())
			return err == nil && !slices.ContainsFunc(s.Members, func(m job.MemberStatus) bool { return !slices.Equal(notes(&m), []string{"here"}) })
		}, time.Minute, 10*time.Millisecond)
		require.Equal(t, t.Name(), s.Job)
		require.Equal(t, 1, s.Epoch)
		require.Equal(t, []string{"n9", "n10"}, s.Hosts)
		require.Len(t, s.Members, 3)
		for rank, m := range s.Members {
			require.Equal(t, ss[rank].Members()[rank], m.Member)
			require.Equal(t, "running", m.State)
		}
	}
}
