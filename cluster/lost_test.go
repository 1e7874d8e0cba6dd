package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// TestLost ends a worker's process in every way, in a world without launcher.
func TestLost(t *testing.T) {
	for _, tc := range []struct{ deed, reason string }{
		{"exit3", "its connection closed: the process ended without Close or Shutdown"},
		{"kill", "its connection closed: the process ended without Close or Shutdown"},
		{"stop", "silent for 2s: stopped, starved or unreachable"},
	} {
		t.Run(tc.deed, func(t *testing.T) {
			t.Parallel()
			addr := freeAddr(t)
			_, port, _ := net.SplitHostPort(addr)
			cmd, out := spawn(t, tc.deed, "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "CHORUS_JOB=lost", "CHORUS_HOST=b", awaitVar+"=before")
			s, err := Join(t.Context(), &JoinConfig{Job: "lost", Size: 2, Rank: new(0), Addr: addr, Serve: true, Timing: quick, Host: "a"})
			require.NoError(t, err)
			defer s.Close()
			require.NoError(t, s.Set(t.Context(), "before", []byte("the loss")))
			// A call that waits ends with the loss, too.
			_, err = s.Get(t.Context(), "never")
			var fromCall *MemberLostError
			require.ErrorAs(t, err, &fromCall)
			lost := requireCause[*MemberLostError](t, s.Context())
			require.Equal(t, []any{1, "b", cmd.Process.Pid, tc.reason, -1}, []any{lost.Rank, lost.Host, lost.PID, lost.Reason, lost.ExitCode})
			require.WithinDuration(t, time.Now(), lost.Since, time.Minute)
			for range 200 { // whether or not the coordinator would still answer
				_, err = s.Get(t.Context(), "before")
				require.ErrorAs(t, err, &fromCall)
			}
			last, err := s.Last(t.Context(), "before")
			require.NoError(t, err)
			require.Equal(t, "the loss", string(last))
			short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			_, err = s.Last(short, "never")
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			if tc.deed == "stop" { // a process that comes back learns that it was lost
				require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
				require.Error(t, cmd.Wait())
				require.Contains(t, out.String(), "after SIGCONT: cluster: rank 1 (host b, pid")
			}
		})
	}
}

// TestCloseIsNoLoss closes one session of three; the others go on.
func TestCloseIsNoLoss(t *testing.T) {
	ss := joinWorld(t, 3, nil)
	require.NoError(t, ss[2].Close())
	err := ss[1].Barrier(t.Context(), "b")
	var be *BarrierError
	require.ErrorAs(t, err, &be)
	require.Equal(t, []int{2}, be.Left)
	require.EqualError(t, err, `cluster: barrier "b" on rank 1: rank 2 left the job without reaching it`)
	require.NoError(t, ss[0].Set(t.Context(), "k", nil))
	_, err = ss[1].Get(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, ss[0].Context().Err())
	_, err = ss[2].Get(t.Context(), "k")
	require.ErrorIs(t, err, ErrClosed)
}

// TestCoordinatorCloses ends the store without failing anybody.
func TestCoordinatorCloses(t *testing.T) {
	ss := joinWorld(t, 2, nil)
	waiting := make(chan error, 1)
	go func() { _, err := ss[1].Get(context.Background(), "never"); waiting <- err }()
	require.NoError(t, ss[0].Close())
	require.ErrorIs(t, <-waiting, ErrEnded)
	require.NoError(t, ss[1].Context().Err())
	require.ErrorIs(t, ss[1].Set(t.Context(), "k", nil), ErrEnded)
	require.NoError(t, ss[1].Shutdown(t.Context()))
}

// TestJoinTimeoutNamesTheMissing lets the time of both who came end in each
// order: none of them is to blame.
func TestJoinTimeoutNamesTheMissing(t *testing.T) {
	t.Parallel()
	limits := [][2]time.Duration{{6 * time.Second, 6 * time.Second}, {6 * time.Second, 30 * time.Second}, {12 * time.Second, 6 * time.Second}}
	errs := make([][2]error, len(limits))
	var wg sync.WaitGroup
	for i, pair := range limits {
		addr := freeAddr(t)
		for k, rank := range []int{0, 2} {
			brief := quick
			brief.Join = pair[k]
			wg.Go(func() {
				_, errs[i][k] = Join(t.Context(), &JoinConfig{Job: "few", Size: 4, Rank: new(rank), Addr: addr, Serve: rank == 0, Timing: brief, Host: "a"})
			})
		}
	}
	wg.Wait()
	for i, pair := range limits {
		for _, err := range errs[i] {
			var e *JoinTimeoutError
			require.ErrorAs(t, err, &e)
			require.Equal(t, []int{1, 3}, e.Missing, "%v", err)
			require.True(t, e.Timeout())
			require.Contains(t, e.Error(), `cluster: join job "few": timed out after `)
			require.Contains(t, e.Error(), "2 of 4 processes have joined: ")
			require.Contains(t, e.Error(), fmt.Sprintf("(host a pid %d)", os.Getpid()))
			require.Contains(t, e.Error(), "; missing ranks 1, 3")
		}
		if pair[0] > pair[1] {
			require.Contains(t, errs[i][0].Error(), "; of these timed out: rank 2 (host a pid ")
		}
	}
}

func TestJoinNobodyAnswers(t *testing.T) {
	t.Parallel()
	brief := quick
	brief.Join = 3 * time.Second
	_, err := Join(t.Context(), &JoinConfig{Job: "j", Size: 2, Rank: new(1), Addr: freeAddr(t), Timing: brief})
	var e *JoinTimeoutError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.Contains(t, err.Error(), "no coordinator answered at 127.0.0.1:")

	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err = Join(ctx, &JoinConfig{Job: "j", Size: 2, Rank: new(1), Addr: freeAddr(t), Timing: quick})
	require.ErrorIs(t, err, context.Canceled)
}

// TestCloseServesWhatIsSet closes the session that holds the coordinator while
// another has still to read what it set.
func TestCloseServesWhatIsSet(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 3, nil)
	require.NoError(t, ss[0].Set(t.Context(), "verdict", []byte("no")))
	require.NoError(t, ss[2].Close())
	ss[0].coord.Drains = time.Minute
	closed := make(chan time.Time, 1)
	go func() { ss[0].Close(); closed <- time.Now() }()
	<-ss[0].Context().Done()
	for range 20 {
		b, err := ss[1].Get(t.Context(), "verdict")
		require.NoError(t, err)
		require.Equal(t, "no", string(b))
	}
	left := time.Now()
	require.NoError(t, ss[1].Close())
	require.Less(t, (<-closed).Sub(left), ss[0].coord.Drains/2, "nobody is left to wait for")
}

// TestSilentCoordinator joins one that says nothing more.
func TestSilentCoordinator(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	keys, err := job.DeriveKeys(nil, "j")
	require.NoError(t, err)
	heard := make(chan []job.Kind, 1)
	go func() {
		var kinds []job.Kind
		defer func() { heard <- kinds }()
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		l, err := job.AcceptHandshake(conn, "j", keys.Control)
		if err != nil {
			return
		}
		for _, m := range []job.Message{
			job.Note(job.KindWelcome, job.Welcome{Host: "a", PID: os.Getpid(), Rank: -1, Heartbeat: 2 * time.Second, LostAfter: 4 * time.Second}),
			job.Note(job.KindWorld, job.World{Members: []Member{{Host: "a"}}}),
		} {
			if l.Write(job.Frame{Body: m.Encode()}, time.Second) != nil {
				return
			}
		}
		for {
			f, err := l.Read()
			if err != nil {
				return
			}
			m, _ := job.DecodeMessage(f.Body)
			kinds = append(kinds, m.Kind)
		}
	}()
	s, err := Join(t.Context(), &JoinConfig{Job: "j", Size: 1, Rank: new(0), Addr: ln.Addr().String(), Insecure: true, Timing: quick, Host: "a"})
	require.NoError(t, err)
	defer s.Close()
	begin := time.Now()
	lost := requireCause[*MemberLostError](t, s.Context())
	require.Less(t, time.Since(begin), quick.Join/2)
	require.Equal(t, []any{-1, "a", os.Getpid()}, []any{lost.Rank, lost.Host, lost.PID})
	require.Equal(t, "its launcher, which coordinates the job, was silent for 4s: stopped, starved or unreachable", lost.Reason)
	kinds := <-heard
	require.Equal(t, job.KindSilent, kinds[len(kinds)-1], "it should know why this process gave up")
}

func TestDuplicateRank(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	cfg := func(rank int, host string) *JoinConfig {
		return &JoinConfig{Job: "twice", Size: 3, Rank: new(rank), Addr: addr, Serve: rank == 0, Timing: quick, Host: host, keepOpen: time.Minute}
	}
	errs := make(chan error, 4)
	sessions := make(chan *Session, 4)
	join := func(c *JoinConfig) {
		s, err := Join(t.Context(), c)
		if err != nil {
			errs <- err
		} else {
			sessions <- s
		}
	}
	go join(cfg(0, "a"))
	go join(cfg(1, "a"))
	go join(cfg(1, "b"))
	// It is over for all at once, also for one that comes now.
	for n := range 4 {
		if n == 1 {
			go join(cfg(2, "a"))
		}
		err := <-errs
		var e *DuplicateError
		require.ErrorAs(t, err, &e)
		require.Equal(t, "rank 1", e.Place)
		require.ElementsMatch(t, []string{"a", "b"}, []string{e.First.Host, e.Second.Host})
		require.Contains(t, e.Error(), fmt.Sprintf("pid %d", os.Getpid()))
	}
	require.Empty(t, sessions)
}

// TestDuplicateCoordinator: the port is taken by the same job, which is no
// matter of ports. The world is complete, and goes on.
func TestDuplicateCoordinator(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 2, nil)
	_, err := Join(t.Context(), &JoinConfig{Job: t.Name(), Size: 2, Rank: new(0), Addr: ss[1].k.Addr, Serve: true,
		Secret: testSecret, Timing: quick, Host: "c", Notify: func(string) {}})
	var e *DuplicateError
	require.ErrorAs(t, err, &e)
	require.Equal(t, "rank 0", e.Place)
	requireAlive(t, ss)
}

func TestAssignedRanks(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 4, func(r int, c *JoinConfig) {
		c.Rank, c.Host, c.Name = nil, []string{"n10", "n9"}[r/2], fmt.Sprint(9-r)
	})
	seen := map[int]string{}
	for _, s := range ss {
		seen[s.Rank()] = s.Host()
	}
	require.Equal(t, map[int]string{0: "n9", 1: "n9", 2: "n10", 3: "n10"}, seen)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 2, nil)
	c := &JoinConfig{Job: t.Name(), Size: 3, Rank: new(2), Addr: ss[1].k.Addr, Secret: testSecret, Timing: quick}
	_, err := Join(t.Context(), c)
	var e *RefusedError
	require.ErrorAs(t, err, &e)
	require.Contains(t, err.Error(), "the process has world size 3, the coordinator 2")
	c.Size, c.Rank = 2, new(1)
	_, err = Join(t.Context(), c)
	var d *DuplicateError
	require.ErrorAs(t, err, &d)
	require.NoError(t, ss[0].Context().Err())
}

// TestWrongSecret, and another job at the same port.
func TestWrongSecret(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 2, nil)
	begin := time.Now()
	for _, c := range []*JoinConfig{
		{Job: t.Name(), Secret: []byte("not the right secret")},
		{Job: t.Name(), Insecure: true},
		{Job: "other", Secret: testSecret},
	} {
		says := "different secret: "
		if c.Job == "other" {
			says = "different job: "
		}
		c.Size, c.Rank, c.Addr, c.Timing = 2, new(1), ss[1].k.Addr, quick
		_, err := Join(t.Context(), c)
		var e *AuthError
		require.ErrorAs(t, err, &e)
		require.Contains(t, err.Error(), says)
	}
	require.Less(t, time.Since(begin), quick.Join/2)
	require.NoError(t, ss[0].Set(t.Context(), "k", nil))
}

// A process that does not answer has the port of the coordinator.
func TestPortOfAStoppedProcess(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	c := &JoinConfig{Job: "j", Size: 2, Rank: new(0), Addr: ln.Addr().String(), Serve: true, Insecure: true, Timing: quick}
	c.Timing.Join = 50 * time.Millisecond
	_, err = Join(t.Context(), c)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.Contains(t, err.Error(), "the process that has the port does not answer")
	c.Timing.Join = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Join(ctx, c)
	require.ErrorIs(t, err, context.Canceled)
}

// TestOneLimitForAJoin checks that the check of a port that is taken and the join have one time limit together.
func TestOneLimitForAJoin(t *testing.T) {
	for name, join := range map[string]func(*JoinConfig) error{
		"Join": func(c *JoinConfig) error { _, err := Join(t.Context(), c); return err },
		"Run": func(c *JoinConfig) error {
			return Run(t.Context(), &RunConfig{Join: c}, func(context.Context, *World) error { return nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const late = 1500 * time.Millisecond
			c := &JoinConfig{Job: "j", Size: 2, Rank: new(0), Addr: answerOnce(t, late), Serve: true, Insecure: true, Timing: quick}
			c.Timing.Join = 2 * late
			begun := time.Now()
			err := join(c)
			took := time.Since(begun)
			var e *JoinTimeoutError
			require.ErrorAs(t, err, &e)
			require.Less(t, took-e.Waited, late, "the check of the port has another limit")
		})
	}
}

// answerOnce returns the address of a process that says once, after a delay, that it coordinates the job, and
// is silent then. If this machine stands still and the delay is too long for the first attempt, it answers the next one.
func answerOnce(t *testing.T, delay time.Duration) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	keys, err := job.DeriveKeys(nil, "j")
	require.NoError(t, err)
	go func() {
		for answered := false; ; {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if answered {
				continue
			}
			time.Sleep(delay)
			delay = 0
			if l, err := job.AcceptHandshake(c, "j", keys.Control); err == nil {
				answered = l.Write(job.Frame{Body: job.Note(job.KindWelcome, job.Welcome{Heartbeat: time.Minute, LostAfter: time.Hour}).Encode()}, job.HandshakeTimeout) == nil
			}
		}
	}()
	return ln.Addr().String()
}

func TestPortTaken(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Write([]byte(strings.Repeat("220 mail.example ESMTP\r\n", 10)))
			c.Close()
		}
	}()
	c := &JoinConfig{Job: "j", Size: 2, Rank: new(0), Addr: ln.Addr().String(), Serve: true, Insecure: true, Timing: quick}
	_, err = Join(t.Context(), c)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.Contains(t, err.Error(), "another program or another job has the port")
	c.Rank, c.Serve = new(1), false
	_, err = Join(t.Context(), c)
	var e *AuthError
	require.ErrorAs(t, err, &e)
	require.Contains(t, err.Error(), "not a Chorus coordinator")
}
