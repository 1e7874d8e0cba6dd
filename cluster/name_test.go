package cluster

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

func TestNames(t *testing.T) {
	for _, bad := range []string{"a\nb", "\x1b[2J", "a\\x0a", "\u202e", strings.Repeat("x", 256)} {
		_, err := job.Start(t.Context(), &job.Config{Host: bad})
		require.ErrorContains(t, err, "the name of the host")
		_, err = job.Start(t.Context(), &job.Config{Job: bad})
		require.ErrorContains(t, err, "the name of the job")
		_, err = Join(t.Context(), &JoinConfig{Name: bad})
		require.ErrorContains(t, err, "the name of the process")
		require.False(t, strings.ContainsAny(err.Error(), "\n\x1b"))
	}
	s, err := Join(t.Context(), &JoinConfig{Host: "node 1 (é)", Name: "x"})
	require.NoError(t, err)
	require.NoError(t, s.Close())
}

func TestInsecureIsTold(t *testing.T) {
	var lines []string
	addr := freeAddr(t)
	s, err := Join(t.Context(), &JoinConfig{Job: t.Name(), Size: 1, Rank: new(0), Addr: addr, Serve: true, Insecure: true, Timing: quick,
		Notify: func(line string) { lines = append(lines, line) }})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Contains(t, lines, job.Insecure)
	c := &job.Config{Job: "j", Nodes: 2, Seeds: []string{"a"}, Insecure: true, Notify: func(line string) { lines = append(lines, line) }}
	lines = nil
	_, _, err = c.Complete()
	require.NoError(t, err)
	require.Equal(t, []string{job.Insecure}, lines)
}
