package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// startAll starts agents at the same time.
func startAll(t *testing.T, cfgs ...*job.Config) ([]*job.Agent, []error) {
	t.Helper()
	as, errs := make([]*job.Agent, len(cfgs)), make([]error, len(cfgs))
	var wg sync.WaitGroup
	for i, c := range cfgs {
		wg.Go(func() { as[i], errs[i] = job.Start(t.Context(), c) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, a := range as {
			a.Close()
		}
	})
	return as, errs
}

// onLoopback makes configs of n hosts at 127.0.0.1, .2, …, the first seeds of
// which may coordinate.
func onLoopback(t *testing.T, n, seeds int) []*job.Config {
	t.Helper()
	_, port, _ := net.SplitHostPort(freeAddr(t))
	var list []string
	for i := range seeds {
		list = append(list, fmt.Sprintf("127.0.0.%d:%s", i+1, port))
	}
	var out []*job.Config
	for i := range n {
		out = append(out, &job.Config{Job: t.Name(), Nodes: n, LocalSize: i + 1, Host: fmt.Sprintf("n%d", 9+i), Seeds: list,
			Bind: fmt.Sprintf("127.0.0.%d:%s", i+1, port), Secret: testSecret, Timing: quick, Notify: func(string) {}})
	}
	return out
}

// attachAll attaches all workers of agents from their environments.
func attachAll(t *testing.T, as ...*job.Agent) []*Session {
	t.Helper()
	var envs []func(string) (string, bool)
	for _, a := range as {
		for local := range a.LocalSize() {
			envs = append(envs, environ(strings.Join(a.WorkerEnv(local), " ")))
		}
	}
	ss, errs := make([]*Session, len(envs)), make([]error, len(envs))
	var wg sync.WaitGroup
	for i, e := range envs {
		wg.Go(func() {
			var c *JoinConfig
			if c, errs[i] = detect(e); errs[i] == nil {
				ss[i], errs[i] = Join(t.Context(), c)
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		for _, s := range ss {
			s.Close()
		}
	})
	return ss
}

func TestAgentAlone(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	a, err := job.Start(t.Context(), &job.Config{LocalSize: 3, Timing: quick})
	require.NoError(t, err)
	defer a.Close()
	ss := attachAll(t, a)
	require.NoError(t, ss[0].Set(t.Context(), "k", []byte("v")))
	require.NoError(t, every(ss, func(s *Session) error { _, err := s.Get(t.Context(), "k"); return err }))
	t.Logf("start, attach and exchange took %v", time.Since(begin))
	require.Nil(t, a.Gossip, "one host waits for no gossip")
	require.Equal(t, []int{0, 1, 0, 3, 3}, []int{a.Now.Load().Place.Load().Node, a.Nodes(), a.Rank(0), a.LocalSize(), a.Size()})
	require.True(t, strings.HasPrefix(ss[1].Source(), "chorus run: CHORUS_RANK=1, "), ss[1].Source())
	env := a.WorkerEnv(2)
	for _, v := range []string{"RANK=2", "WORLD_SIZE=3", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "MASTER_ADDR=127.0.0.1"} {
		require.Contains(t, env, v)
	}
	// MASTER_PORT is free for whoever binds it by its number.
	i := slices.IndexFunc(env, func(s string) bool { return strings.HasPrefix(s, "MASTER_PORT=") })
	ln, err := net.Listen("tcp", "127.0.0.1:"+strings.TrimPrefix(env[i], "MASTER_PORT="))
	require.NoError(t, err)
	ln.Close()
	require.NoError(t, every(ss, func(s *Session) error { return s.Shutdown(t.Context()) }))
	require.NoError(t, a.Shutdown(t.Context()))
	require.NoError(t, a.Close())
	require.NoError(t, a.Close())
}

func TestAgentsMeet(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 3, 2)...)
	require.NoError(t, errors.Join(errs...))
	for i, a := range as {
		require.Equal(t, i, a.Now.Load().Place.Load().Node, "n9 is before n10")
		require.Equal(t, 6, a.Size())
		require.Equal(t, []int{0, 1, 3}[i], a.Rank(0))
		require.Equal(t, as[0].Addr, a.Addr)
	}
	ss := attachAll(t, as...)
	require.NoError(t, every(ss, func(s *Session) error { return s.Barrier(t.Context(), "b") }))
	require.Equal(t, []int{5, 2, 2, 3}, []int{ss[5].Rank(), ss[5].LocalRank(), ss[5].Node(), ss[5].LocalSize()})
	require.NoError(t, every(ss, func(s *Session) error { return s.Shutdown(t.Context()) }))
	done := make(chan error, 1)
	go func() { done <- as[0].Shutdown(t.Context()) }()
	select {
	case <-done:
		require.FailNow(t, "shut down before the others")
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, as[1].Shutdown(contextWith(t, as[2])))
	require.NoError(t, <-done)
}

// contextWith shuts down another agent meanwhile.
func contextWith(t *testing.T, a *job.Agent) context.Context {
	go a.Shutdown(t.Context())
	return t.Context()
}

func TestAgentReports(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 2, 1)...)
	require.NoError(t, errors.Join(errs...))
	ss := attachAll(t, as...)
	require.NoError(t, as[1].Report(1, job.Exit{PID: 77, Code: 139}))
	for _, ctx := range []context.Context{as[0].Context(), as[1].Context(), ss[0].Context(), ss[1].Context()} {
		e := requireCause[*MemberLostError](t, ctx)
		require.Equal(t, []any{2, "n10", 77, 139, "killed by signal 11"}, []any{e.Rank, e.Host, e.PID, e.ExitCode, e.Reason})
	}
	// A later failure is a consequence.
	require.NoError(t, as[0].Report(0, job.Exit{PID: 78, Code: 1}))
	require.Equal(t, 2, requireCause[*MemberLostError](t, as[0].Context()).Rank)
}

func TestAgentStops(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 2, 1)...)
	require.NoError(t, errors.Join(errs...))
	ss := attachAll(t, as...)
	require.NoError(t, as[1].Stop("received SIGTERM", 143))
	e := requireCause[*StopError](t, as[0].Context())
	require.Equal(t, &StopError{Host: "n10", Reason: "received SIGTERM", ExitCode: 143}, e)
	// Workers may need each other to end well.
	require.NoError(t, ss[0].Context().Err())
	require.NoError(t, every(ss, func(s *Session) error { return s.Barrier(t.Context(), "end") }))
}
