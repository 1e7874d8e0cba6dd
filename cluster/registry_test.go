package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// serve starts a registry at a port of its own.
func serve(t *testing.T, change func(*RegistryConfig)) *Registry {
	t.Helper()
	cfg := &RegistryConfig{Job: "gang", Addr: "127.0.0.1:0", Secret: testSecret, Timing: quick, Notify: func(string) {}}
	if change != nil {
		change(cfg)
	}
	r, err := Serve(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

func configOf(r *Registry, name string) *EnlistConfig {
	return &EnlistConfig{Job: r.cfg.Job, Addr: r.Addr(), Name: name, Value: []byte("value of " + name), Host: "host of " + name, Secret: r.cfg.Secret, Timing: quick, Notify: func(string) {}}
}

// enlistAs puts a member on the list.
func enlistAs(t *testing.T, r *Registry, name string) *Enlistment {
	t.Helper()
	m, err := Enlist(t.Context(), configOf(r, name))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// awaitNames waits until the list has these names.
func awaitNames(t *testing.T, r *Registry, want ...string) []Listed {
	t.Helper()
	for limit := time.After(time.Minute); ; {
		list, changed := r.Members()
		names := []string{}
		for _, m := range list {
			names = append(names, m.Name)
		}
		if slices.Equal(names, want) {
			return list
		}
		select {
		case <-changed:
		case <-limit:
			require.Equal(t, want, names)
		}
	}
}

// meet lets members come to their next world.
func meet(t *testing.T, ms ...*Enlistment) ([]*Session, []error) {
	ss, errs := make([]*Session, len(ms)), make([]error, len(ms))
	var wg sync.WaitGroup
	for i, m := range ms {
		wg.Go(func() { ss[i], errs[i] = m.World(t.Context()) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, s := range ss {
			s.Close()
		}
	})
	return ss, errs
}

// begin begins a world of members and lets them come.
func begin(t *testing.T, r *Registry, ms ...*Enlistment) []*Session {
	t.Helper()
	names := []string{}
	for _, m := range ms {
		names = append(names, m.cfg.Name)
	}
	require.NoError(t, r.Begin(names...))
	ss, errs := meet(t, ms...)
	require.NoError(t, errors.Join(errs...))
	for i, s := range ss {
		require.Equal(t, []int{i, len(ms)}, []int{s.Rank(), s.Size()})
		require.Equal(t, names[i], s.Members()[i].Name)
		require.Equal(t, "host of "+names[i], s.Host())
	}
	return ss
}

// greet lets all sessions of a world set a value and read all others'.
func greet(t *testing.T, ss []*Session) {
	t.Helper()
	require.NoError(t, every(ss, func(s *Session) error {
		if err := s.Set(t.Context(), fmt.Sprint(s.Rank()), []byte(s.Job())); err != nil {
			return err
		}
		for i := range ss {
			if b, err := s.Get(t.Context(), fmt.Sprint(i)); err != nil || string(b) != s.Job() {
				return fmt.Errorf("%q: %w", b, err)
			}
		}
		return nil
	}))
}

// awaitWorlds waits until the registry has so many worlds.
func awaitBegun(t *testing.T, r *Registry, want int) {
	t.Helper()
	require.Eventually(t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.worlds) == want
	}, time.Minute, time.Millisecond)
}

// Members come, are in several worlds at a time, leave and return.
func TestRegistry(t *testing.T) {
	r := serve(t, nil)
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	c := enlistAs(t, r, "c")
	list := awaitNames(t, r, "a", "b", "c")
	require.Equal(t, Listed{"b", "host of b", os.Getpid(), []byte("value of b")}, list[1])
	list[1].Value[0] = 'X'
	list, _ = r.Members()
	require.Equal(t, "value of b", string(list[1].Value), "the caller owns the list")

	ab := begin(t, r, b, a) // in this order
	bc := begin(t, r, b, c) // overlapping
	greet(t, ab)
	greet(t, bc)
	require.NotEqual(t, ab[0].Job(), bc[0].Job())
	awaitBegun(t, r, 2)
	require.NoError(t, every(ab, func(s *Session) error { return s.Shutdown(t.Context()) }))
	awaitBegun(t, r, 1)
	require.NoError(t, bc[0].Context().Err(), "the other world goes on")
	_, err := bc[0].Add(t.Context(), "n", 1)
	require.NoError(t, err)

	require.NoError(t, c.Close()) // leaves the list, not the world
	awaitNames(t, r, "a", "b")
	err = r.Begin("a", "c")
	require.EqualError(t, err, fmt.Sprintf(`cluster: registry "gang": begin a world of 2 members: member c (host host of c pid %d) has left`, os.Getpid()))
	_, err = bc[1].Add(t.Context(), "n", 1)
	require.NoError(t, err)
	require.NoError(t, bc[0].Context().Err())
	_, err = c.World(t.Context())
	require.ErrorIs(t, err, ErrDelisted)
	require.ErrorIs(t, err, ErrClosed)
	left := r.Left()
	require.Len(t, left, 1)
	require.Equal(t, []any{"c", "left", true}, []any{left[0].Name, left[0].Reason, left[0].Planned})

	again := enlistAs(t, r, "c")
	greet(t, begin(t, r, again, a, b))

	for want, names := range map[string][]string{
		"no member has the name d":     {"a", "d"},
		"member a is named twice":      {"a", "b", "a"},
		"begin a world of 0 members: ": nil,
	} {
		require.ErrorContains(t, r.Begin(names...), want)
	}
}

// The second of two processes with a name is refused, and the first one's host is named. A name is free as soon as its member
// has left.
func TestRegistryNameTwice(t *testing.T) {
	r := serve(t, nil)
	a := enlistAs(t, r, "a")
	_, err := Enlist(t.Context(), configOf(r, "a"))
	var taken *DuplicateError
	require.ErrorAs(t, err, &taken)
	require.ErrorContains(t, err, fmt.Sprintf("the name a is taken: by host host of a pid %d", os.Getpid()))
	awaitNames(t, r, "a")
	require.NoError(t, a.Close())
	enlistAs(t, r, "a")
}

// A killed member ends its worlds, and no others; it returns with the same name as another process.
func TestRegistryLoss(t *testing.T) {
	for _, deed := range []string{"kill", "stop"} {
		t.Run(deed, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			var lines []string
			r := serve(t, func(c *RegistryConfig) {
				c.Notify = func(line string) { mu.Lock(); defer mu.Unlock(); lines = append(lines, line) }
			})
			a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
			cmd, out := spawn(t, "member-"+deed, "REGISTRY="+r.Addr())
			awaitNames(t, r, "a", "b", "x")
			ab := begin(t, r, a, b)
			require.NoError(t, r.Begin("x", "a"))
			ss, errs := meet(t, a)
			require.NoError(t, errs[0], out)
			require.NoError(t, ss[0].Set(t.Context(), "go", nil)) // x ends now
			lost := requireCause[*MemberLostError](t, ss[0].Context())
			require.Equal(t, []any{0, cmd.Process.Pid}, []any{lost.Rank, lost.PID})
			awaitNames(t, r, "a", "b")
			greet(t, ab)
			err := r.Begin("a", "x")
			require.ErrorContains(t, err, fmt.Sprintf("member x (host h pid %d) was lost: ", cmd.Process.Pid))
			mu.Lock()
			require.Contains(t, strings.Join(lines, "\n"), "job gang: member x (host h pid")
			mu.Unlock()
			ss[0].Close()
			x := enlistAs(t, r, "x")
			greet(t, begin(t, r, x, a))
			if deed == "stop" { // the registry lives: it is not this process that has ended
				require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
				require.Error(t, cmd.Wait())
				require.Contains(t, out.String(), "the registry in it closed the connection, and then refused this process: this process is not a member of the job any more")
			}
		})
	}
}

// memberMain is a member that ends badly.
func memberMain(deed string) int {
	ctx := context.Background()
	m, err := Enlist(ctx, &EnlistConfig{Job: "gang", Addr: os.Getenv("REGISTRY"), Name: "x", Host: "h", Secret: testSecret, Timing: quick})
	if err != nil {
		fmt.Println(err)
		return 51
	}
	s, err := m.World(ctx)
	if err != nil {
		fmt.Println(err)
		return 52
	}
	if _, err := s.Get(ctx, "go"); err != nil {
		fmt.Println(err)
		return 53
	}
	if deed == "kill" {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	_, err = m.World(ctx) // after SIGCONT
	fmt.Println(err)
	return 54
}

// A member that ends before the world is complete fails it for those that came, and for those that come later.
func TestRegistryLossBeforeTheWorld(t *testing.T) {
	r := serve(t, nil)
	a, b, c := enlistAs(t, r, "a"), enlistAs(t, r, "b"), enlistAs(t, r, "c")
	require.NoError(t, r.Begin("a", "b", "c"))
	failed := make(chan error)
	go func() { _, err := a.World(t.Context()); failed <- err }()
	require.NoError(t, b.Close())
	for _, err := range []error{<-failed, func() error { _, err := c.World(t.Context()); return err }()} {
		lost, ok := errors.AsType[*MemberLostError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, []any{1, "host of b"}, []any{lost.Rank, lost.Host})
		require.ErrorContains(t, err, "left the registry before the world was complete")
		require.NotErrorIs(t, err, ErrDelisted)
	}
	greet(t, begin(t, r, a, c)) // the next one
}

// The end of the registry ends its members' worlds.
func TestRegistryEnds(t *testing.T) {
	r := serve(t, nil)
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	ss := begin(t, r, a, b)
	waits, gets := make(chan error), make(chan error)
	go func() { _, err := a.World(t.Context()); waits <- err }()
	go func() { _, err := ss[0].Get(t.Context(), "never"); gets <- err }()
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	err := <-waits
	require.ErrorIs(t, err, ErrDelisted)
	require.EqualError(t, err, `cluster: registry "gang": member a: not on the list of the registry any more: cluster: the coordinator has left, and the store with it`)
	require.ErrorIs(t, err, ErrEnded)
	require.ErrorIs(t, <-gets, ErrEnded)
	require.ErrorIs(t, r.Begin("a", "b"), ErrClosed)
}

// Others are refused before they can say anything.
func TestRegistryRefuses(t *testing.T) {
	r := serve(t, nil)
	var auth *AuthError
	var bad *ConfigError
	var refused *RefusedError
	for want, tc := range map[string]struct {
		change func(*EnlistConfig)
		as     any
	}{
		"different secret":        {func(c *EnlistConfig) { c.Secret = []byte("another secret of 32 bytes......") }, &auth},
		"different job":           {func(c *EnlistConfig) { c.Job = "other" }, &auth},
		"the value has 16385":     {func(c *EnlistConfig) { c.Value = make([]byte, job.MaxEnlistedBytes+1) }, &bad},
		"want graphic characters": {func(c *EnlistConfig) { c.Name = "a\x1b[2J" }, &bad},
		"want host:port":          {func(c *EnlistConfig) { c.Addr = "127.0.0.1" }, &bad},
		"no name":                 {func(c *EnlistConfig) { c.Name = "" }, &bad},
		"the name of the process": {func(c *EnlistConfig) { c.Name = strings.Repeat("n", 300) }, &bad},
	} {
		c := configOf(r, "a")
		tc.change(c)
		_, err := Enlist(t.Context(), c)
		require.ErrorContains(t, err, want)
		require.ErrorAs(t, err, tc.as)
	}
	_, err := Join(t.Context(), &JoinConfig{Job: "gang", Addr: r.Addr(), Secret: testSecret, Timing: quick, Notify: func(string) {}})
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "call cluster.Enlist")
	ss := joinWorld(t, 2, nil)
	c := configOf(r, "a")
	c.Job, c.Addr = ss[0].Job(), ss[0].k.To.Addr
	_, err = Enlist(t.Context(), c)
	require.ErrorContains(t, err, "call cluster.Join")
	awaitNames(t, r)

	_, err = Serve(t.Context(), &RegistryConfig{Addr: "10.0.0.1:0"})
	require.ErrorContains(t, err, "no secret")
	_, err = Serve(t.Context(), &RegistryConfig{Addr: r.Addr(), Secret: testSecret})
	require.ErrorContains(t, err, "address already in use")
	_, err = Serve(t.Context(), &RegistryConfig{Job: strings.Repeat("j", 250), Addr: "127.0.0.1:0"})
	require.ErrorContains(t, err, "want at most 255")
}

// The system chooses the port of each registry, also if Unix sockets take the place of ports, and Addr can be used by others.
func TestRegistryChoosesPort(t *testing.T) {
	for name, secret := range map[string][]byte{"secret": testSecret, "user": nil} {
		t.Run(name, func(t *testing.T) {
			var rs [2]*Registry
			for i := range rs {
				rs[i] = serve(t, func(c *RegistryConfig) { c.Secret, c.Addr = secret, "localhost:0" })
				_, port, err := net.SplitHostPort(rs[i].Addr())
				require.NoError(t, err)
				require.NotEqual(t, "0", port)
				enlistAs(t, rs[i], "a")
			}
			require.NotEqual(t, rs[0].Addr(), rs[1].Addr())
		})
	}
	r := serve(t, func(c *RegistryConfig) { c.Addr, c.Listen = "localhost:0", "127.0.0.1:0" })
	host, _, err := net.SplitHostPort(r.Addr())
	require.NoError(t, err)
	require.Equal(t, "localhost", host, "others may not know the address that it listens on")
	_, err = Serve(t.Context(), &RegistryConfig{Job: "gang", Addr: r.Addr(), Secret: testSecret})
	require.ErrorContains(t, err, `another registry "gang", or another program, has it`)
}

// Close wakes those that wait for a change of the list.
func TestRegistryCloseEmptiesList(t *testing.T) {
	r := serve(t, nil)
	enlistAs(t, r, "a")
	list, changed := r.Members()
	require.Len(t, list, 1)
	require.NoError(t, r.Close())
	<-changed
	list, _ = r.Members()
	require.Empty(t, list)
	require.ErrorIs(t, r.Await(t.Context(), "a"), ErrClosed)
}

// Other programs at the port do not disturb the members.
func TestRegistryForeignPrograms(t *testing.T) {
	r := serve(t, nil)
	tag := job.JobTag("gang")
	for _, text := range []string{"", "GET / HTTP/1.1\r\n\r\n", "chor", "chor\x01", string(job.Magic[:]) + string(rune(job.ProtocolVersion)) + string(tag[:]),
		string(job.Magic[:]) + string(rune(job.ProtocolVersion)) + strings.Repeat("x", job.HelloBytes-5)} {
		conn, err := net.Dial("tcp", r.Addr())
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Write([]byte(text))
		require.NoError(t, err)
	}
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	greet(t, begin(t, r, a, b))
}

// Processes of one user need no secret on one host.
func TestRegistryOfAUser(t *testing.T) {
	r := serve(t, func(c *RegistryConfig) { c.Secret, c.Addr = nil, freeAddr(t) })
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	greet(t, begin(t, r, a, b))
}

// A world whose members do not come ends by its time limit, and its place is free again.
func TestRegistryJoinTimeout(t *testing.T) {
	t.Parallel()
	r := serve(t, func(c *RegistryConfig) { c.Timing.Join = 6 * time.Second }) // a busy machine needs some of it until a has come
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	require.NoError(t, r.Begin("a", "b"))
	_, err := a.World(t.Context())
	late, ok := errors.AsType[*JoinTimeoutError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []int{1}, late.Missing)
	awaitBegun(t, r, 0)
	_, err = b.World(t.Context())
	require.ErrorContains(t, err, "has ended before this process came")
	greet(t, begin(t, r, a, b))
}

// Await names members that have not come.
func TestRegistryAwaits(t *testing.T) {
	t.Parallel()
	r := serve(t, nil)
	enlistAs(t, r, "a")
	require.NoError(t, r.Await(t.Context(), "a"))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("no more time"))
	require.EqualError(t, r.Await(ctx, "a", "b"), `cluster: registry "gang": 1 of 2 awaited members have not come, such as b: no more time`)
}

// The places of worlds whose members have all left the registry are free at once, because nobody can come to them any more. A world
// that has failed with members that may still come counts for LostAfter.
func TestWorldsOfMembersThatHaveLeft(t *testing.T) {
	t.Parallel()
	r := serve(t, func(c *RegistryConfig) { c.Timing.LostAfter = time.Hour })
	a, b, c := enlistAs(t, r, "a"), enlistAs(t, r, "b"), enlistAs(t, r, "c")
	for range maxWorlds - 1 {
		require.NoError(t, r.Begin("a"))
	}
	require.NoError(t, r.Begin("a", "b"))
	full := fmt.Sprintf("%d worlds have not ended: a world ends when its members have closed or shut down their sessions or left the registry, "+
		"and one that has failed before all had come ends after 1h0m0s more", maxWorlds)
	require.ErrorContains(t, r.Begin("c"), full)
	require.NoError(t, a.Close())
	awaitNames(t, r, "b", "c")
	for range maxWorlds - 1 {
		require.NoError(t, r.Begin("c"))
	}
	require.ErrorContains(t, r.Begin("c"), full, "b may still come to its world with a")
	_, err := b.World(t.Context())
	require.ErrorContains(t, err, "left the registry before the world was complete")
	require.NoError(t, c.Close())
	awaitNames(t, r, "b")
	require.NoError(t, r.Begin("b"))
	ss, errs := meet(t, b)
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, b.Close())
	require.NoError(t, ss[0].Set(t.Context(), "key", nil), "the session of a member that has left goes on")
}

// The registry may hear late that a member has left. A world that began since then has another member of that name.
func TestRegistryHearsLateOfADeparture(t *testing.T) {
	t.Parallel()
	r := serve(t, nil)
	require.NoError(t, enlistAs(t, r, "a").Close())
	awaitNames(t, r)
	a, b := enlistAs(t, r, "a"), enlistAs(t, r, "b")
	require.NoError(t, r.Begin("a", "b"))
	left := r.Left()
	require.Len(t, left, 1)
	r.delisted(left[0], 1)
	ss, errs := meet(t, a, b)
	require.NoError(t, errors.Join(errs...))
	for _, s := range ss {
		require.NoError(t, s.Close())
	}
}
