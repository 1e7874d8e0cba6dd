package job

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// startAll starts agents at the same time.
func startAll(t *testing.T, cfgs ...*Config) ([]*Agent, []error) {
	t.Helper()
	as, errs := make([]*Agent, len(cfgs)), make([]error, len(cfgs))
	var wg sync.WaitGroup
	for i, c := range cfgs {
		wg.Go(func() { as[i], errs[i] = Start(t.Context(), c) })
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
func onLoopback(t *testing.T, n, seeds int) []*Config {
	t.Helper()
	_, port, _ := net.SplitHostPort(freeAddr(t))
	var list []string
	for i := range seeds {
		list = append(list, fmt.Sprintf("127.0.0.%d:%s", i+1, port))
	}
	var out []*Config
	for i := range n {
		out = append(out, &Config{Job: t.Name(), Nodes: n, LocalSize: i + 1, Host: fmt.Sprintf("n%d", 9+i), Seeds: list,
			Bind: fmt.Sprintf("127.0.0.%d:%s", i+1, port), Secret: testSecret, Timing: quick, Notify: func(string) {}})
	}
	return out
}

// TestAgentsMoveToSmallerSeed starts the smaller seed last: the others have
// registered with the greater one by then.
func TestAgentsMoveToSmallerSeed(t *testing.T) {
	t.Parallel()
	cfgs := onLoopback(t, 3, 2)
	type result struct {
		a   *Agent
		err error
	}
	results := make(chan result, 3)
	begin := func(c *Config) { a, err := Start(t.Context(), c); results <- result{a, err} }
	go begin(cfgs[1])
	go begin(cfgs[2])
	time.Sleep(300 * time.Millisecond) // not a must: any order has to end well
	go begin(cfgs[0])
	for range 3 {
		r := <-results
		require.NoError(t, r.err)
		defer r.a.Close()
		require.Equal(t, cfgs[0].Seeds[0], r.a.Addr)
	}
}

func TestAgentCloses(t *testing.T) {
	t.Parallel()
	for victim := range 2 {
		t.Run(fmt.Sprint(victim), func(t *testing.T) {
			t.Parallel()
			as, errs := startAll(t, onLoopback(t, 2, 1)...)
			require.NoError(t, errors.Join(errs...))
			require.NoError(t, as[victim].Close())
			if victim == 1 {
				e := requireCause[*MemberLostError](t, as[0].Context())
				require.Equal(t, []any{-1, "n10"}, []any{e.Rank, e.Host})
				require.Contains(t, e.Error(), "its launcher left before its workers had exited")
			} else {
				e := requireCause[*MemberLostError](t, as[1].Context())
				require.Equal(t, []any{-1, "n9"}, []any{e.Rank, e.Host})
			}
		})
	}
}

// refusedHost starts two hosts, the second of which the first refuses, and
// returns the error of the second and what the first says of that.
//
// A host that is a seed goes on alone, because a refusal proves nothing, and names it when its time to join is over.
func refusedHost(t *testing.T, cfgs []*Config) (string, error) {
	t.Helper()
	if len(cfgs[0].Seeds) > 1 {
		cfgs[1].Timing.Join = 6 * time.Second // a busy machine needs some of it to meet the first
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lines := make(chan string, 100)
	cfgs[0].Notify = func(line string) { lines <- line }
	first := make(chan error, 1)
	go func() { _, err := Start(ctx, cfgs[0]); first <- err }()
	begin := time.Now()
	_, err := Start(t.Context(), cfgs[1])
	require.Error(t, err)
	require.Less(t, time.Since(begin), quick.Join/2)
	var text string
	for !strings.Contains(text, "refused") {
		select {
		case l := <-lines:
			text += l + "\n"
		case <-time.After(time.Minute):
			require.FailNow(t, "the coordinator says nothing of the refusal", text)
		}
	}
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	return text, err
}

func TestAgentsDisagree(t *testing.T) {
	t.Parallel()
	t.Run("node rank twice", func(t *testing.T) {
		cfgs := onLoopback(t, 2, 1)
		cfgs[0].NodeRank, cfgs[1].NodeRank = new(1), new(1)
		begin := time.Now()
		_, errs := startAll(t, cfgs...)
		require.Less(t, time.Since(begin), quick.Join/2)
		for _, err := range errs { // it is over for both
			var d *DuplicateError
			require.ErrorAs(t, err, &d)
			require.Equal(t, "node rank 1", d.Place)
			require.ElementsMatch(t, []string{"n9", "n10"}, []string{d.First.Host, d.Second.Host})
		}
	})
	for seeds := 1; seeds <= 2; seeds++ {
		t.Run(fmt.Sprint("number of hosts, seeds: ", seeds), func(t *testing.T) {
			cfgs := onLoopback(t, 2, seeds)
			cfgs[1].Nodes = 3
			begin := time.Now()
			_, errs := startAll(t, cfgs...)
			require.Less(t, time.Since(begin), quick.Join/2)
			for _, err := range errs { // it is over for both
				var r *RefusedError
				require.ErrorAs(t, err, &r)
				require.Regexp(t, "host n10 has a job of 3 hosts, the coordinator of 2|host n9 has a job of 2 hosts, the coordinator of 3", err.Error())
			}
		})
		t.Run(fmt.Sprint("secret, seeds: ", seeds), func(t *testing.T) {
			cfgs := onLoopback(t, 2, seeds)
			cfgs[1].Secret = []byte("another, also 16 bytes or more")
			lines, err := refusedHost(t, cfgs)
			var a *AuthError
			require.ErrorAs(t, err, &a)
			require.Equal(t, cfgs[0].Seeds[0], a.Addr)
			require.Contains(t, lines, "refused the process at 127.0.0.1:")
			require.Contains(t, lines, ": it has a different secret")
		})
		t.Run(fmt.Sprint("job, seeds: ", seeds), func(t *testing.T) {
			cfgs := onLoopback(t, 2, seeds)
			cfgs[1].Job = "another"
			lines, err := refusedHost(t, cfgs)
			var a *AuthError
			require.ErrorAs(t, err, &a)
			require.Contains(t, lines, ": it belongs to a different job")
		})
	}
	t.Run("config", func(t *testing.T) {
		for _, c := range []*Config{
			{Nodes: 2},
			{Nodes: 2, Seeds: []string{"a"}},
			{Nodes: 2, Seeds: []string{"a"}, Job: "j"},
			{Nodes: 2, Seeds: []string{"a:b:c"}, Job: "j", Insecure: true},
			{Nodes: 2, Seeds: []string{"a:0"}, Job: "j", Insecure: true},
			{NodeRank: new(1)},
			{Secret: []byte("short")},
			{Bind: "192.0.2.1"},
			{Bind: "no host at all"},
			{Bind: "a:b:c"},
			{Nodes: 2, Seeds: []string{"a"}, Job: "j", Insecure: true, Bind: "192.0.2.1:5"},
			{Nodes: 2, Seeds: []string{"a"}, Job: "j", Insecure: true, Bind: "localhost"},
			{Timing: Timing{Heartbeat: time.Second, LostAfter: time.Second}},
		} {
			_, err := Start(t.Context(), c)
			var e *ConfigError
			require.ErrorAs(t, err, &e)
		}
	})
}

// TestRefusalIsAHint asks a coordinator that refuses and one that does not.
func TestRefusalIsAHint(t *testing.T) {
	t.Parallel()
	serve := func(secret string) (string, keys) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ks, err := DeriveKeys([]byte(secret), "j")
		require.NoError(t, err)
		c := NewServer(ln, ServerConfig{Job: "j", Key: ks.Control, Notify: func(string) {}, CoordConfig: CoordConfig{agents: 2, Self: Welcome{Heartbeat: quick.Heartbeat, LostAfter: quick.LostAfter}}})
		t.Cleanup(c.Close)
		return ln.Addr().String(), ks
	}
	other, _ := serve("the secret of another job")
	ours, ks := serve("the secret of this job")
	for _, list := range [][]string{{other, other}, {ours, other}, {other, ours}} {
		v := newVoter(1)
		c := newChoice(&v, list, "", 1)
		var end error
		for todo := c.step(1, begin{}); c.link == 0 && !c.over; {
			var next []action
			for _, x := range todo {
				switch x := x.(type) {
				case dial:
					l, hello, err := Target{Job: "j", Addr: x.addr, Key: ks.Control}.Dial(t.Context())
					if l != nil {
						defer l.Close()
					}
					next = append(next, c.step(c.now, answered{dial: x.dial, hello: hello, refused: IsRefusal(err), err: err})...)
				case notChosen:
					end = x.err
				}
			}
			if todo = next; len(todo) == 0 && !c.over {
				at, _ := c.next()
				todo = c.step(at, nil)
			}
		}
		if list[0] == list[1] {
			require.True(t, IsRefusal(end) || IsRefusal(c.failure))
			require.Equal(t, Refusals, c.rejections)
		} else {
			require.Equal(t, ours, c.addr)
		}
	}
}

// TestAgentShutdownOfFailedJob is told of the failure and then of the end.
func TestAgentShutdownOfFailedJob(t *testing.T) {
	t.Parallel()
	a, err := Start(t.Context(), &Config{Timing: quick})
	require.NoError(t, err)
	defer a.Close()
	cause := errors.New("a failure")
	a.k.Cancel(cause)
	a.k.dispatch(Note(kindEnded, nil))
	for range 20 {
		require.ErrorIs(t, a.Shutdown(t.Context()), cause)
	}
}

// TestGossipSees waits until the agents' gossip has found each other.
func TestGossipSees(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 3, 2)...)
	require.NoError(t, errors.Join(errs...))
	require.Eventually(t, func() bool {
		g := as[2].Gossip
		if g == nil || g.path(as[0].Now.Load().Place.Load().plan.Hosts[1]) != "" {
			return false
		}
		for _, a := range as {
			if g.addrOf(a.UUID) != a.Gossip.at {
				return false
			}
		}
		return true
	}, 90*time.Second, 10*time.Millisecond) // a lost update waits for the next push and pull, more than once where the machine is busy
}
