package cluster

import (
	"context"
	"errors"
	"net"
	"os"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// A ran is a call of Run in this process, which stands for a worker.
type ran struct {
	local  int
	agent  *job.Agent
	worlds chan *World // each that fn gets
	steps  chan int    // steps that fn has begun in an epoch, after its end
	finish chan struct{}
	result chan error
	now    *World        // the last that the test has taken from worlds
	deaf   chan struct{} // if it is not nil, fn returns only when it is closed
	from   int           // the first epoch for which deaf holds
}

// runWorker starts a worker whose function takes steps until its epoch ends or finish is closed.
func runWorker(t *testing.T, a *job.Agent, local int, cfg RunConfig) *ran {
	r := newRan(a, local)
	r.start(t, cfg)
	return r
}

func newRan(a *job.Agent, local int) *ran {
	return &ran{local: local, agent: a, worlds: make(chan *World, 100), steps: make(chan int, 100), finish: make(chan struct{}), result: make(chan error, 1)}
}

func (r *ran) start(t *testing.T, cfg RunConfig) {
	j, err := detect(environ(strings.Join(r.agent.WorkerEnv(r.local), " ")))
	require.NoError(t, err)
	j.Notify = func(string) {}
	cfg.Join = j
	go func() { // whose label, which its goroutines inherit, tells its processor time from the launchers' in a profile
		pprof.Do(t.Context(), pprof.Labels("process", "worker"), func(ctx context.Context) { r.result <- Run(ctx, &cfg, r.work) })
	}()
}

func (r *ran) work(ctx context.Context, w *World) error {
	r.worlds <- w
	n := 0
	defer func() { r.steps <- n }()
	defer func() {
		if r.deaf != nil && w.Epoch() >= r.from && ctx.Err() != nil { // also if Step has returned the end of the epoch
			<-r.deaf
		}
	}()
	for {
		if err := w.Step(); err != nil {
			return err
		}
		n++
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-r.finish:
			return nil
		case <-time.After(time.Millisecond):
		}
	}
}

// world returns the next world, which must have the epoch.
func (r *ran) world(t *testing.T, epoch int) *World {
	t.Helper()
	select {
	case w := <-r.worlds:
		require.Equal(t, epoch, w.Epoch())
		r.now = w
		return w
	case err := <-r.result:
		require.FailNow(t, "Run has returned", err)
	case <-time.After(time.Minute):
		require.FailNow(t, "no epoch", epoch)
	}
	return nil
}

// last returns the last world that has begun.
func (r *ran) last(t *testing.T) *World {
	t.Helper()
	if r.now == nil {
		r.awaitSize(t, 0)
	}
	return r.now
}

// awaitSize waits for a world of n members, or of any number if n is 0.
func (r *ran) awaitSize(t *testing.T, n int) *World {
	t.Helper()
	for {
		select {
		case w := <-r.worlds:
			if r.now = w; n == 0 || w.Size() == n {
				return w
			}
		case err := <-r.result:
			require.FailNow(t, "Run has returned", err)
		case <-time.After(time.Minute):
			require.FailNow(t, "no world", "of size %d", n)
		}
	}
}

// requireLine waits for a line that matches.
func requireLine(t *testing.T, lines <-chan string, expression string) {
	t.Helper()
	var all []string
	for {
		select {
		case line := <-lines:
			if all = append(all, line); regexp.MustCompile(expression).MatchString(line) {
				return
			}
		case <-time.After(time.Minute):
			require.FailNow(t, "no line", "%s in\n%s", expression, strings.Join(all, "\n"))
		}
	}
}

// kill ends a worker like kill -9, as far as the others can see.
func (r *ran) kill(t *testing.T, w *World) {
	t.Helper()
	require.NoError(t, reportKill(r.agent, r.local, os.Getpid(), time.Minute))
	w.calls.(job.Remote).Client.CloseConnection()
	require.Error(t, <-r.result)
}

// reportKill reports that a worker was killed, and waits until the coordinator has the report, at most for limit. Without a
// report, the coordinator loses the worker soon after its connection has ended, for another reason.
func reportKill(a *job.Agent, local, pid int, limit time.Duration) error {
	k := a.Client()
	if err := a.Report(local, job.Exit{PID: pid, Code: 137, Reason: "killed by SIGKILL"}); err != nil {
		return err
	}
	k.Stream.SendBeat() // its echo acknowledges the report
	k.Stream.Flush(limit)
	return nil
}

func (r *ran) returned(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.result:
		return err
	case <-time.After(time.Minute):
		require.FailNow(t, "Run has not returned")
		return nil
	}
}

func orderOf(t *testing.T, a *job.Agent) job.Order {
	t.Helper()
	select {
	case o := <-a.Orders():
		return o
	case <-time.After(time.Minute):
		require.FailNow(t, "no order")
		return job.Order{}
	}
}

// elasticJob starts agents and their workers, and waits for the first epoch.
func elasticJob(t *testing.T, rc RunConfig, cfgs ...*job.Config) ([]*job.Agent, []*ran) {
	t.Helper()
	as, errs := startAll(t, cfgs...)
	require.NoError(t, errors.Join(errs...))
	var rs []*ran
	for _, a := range as {
		for local := range a.LocalSize() {
			rs = append(rs, runWorker(t, a, local, rc))
		}
	}
	for i, r := range rs {
		w := r.world(t, 1)
		require.Equal(t, []int{i, len(rs)}, []int{w.Rank(), w.Size()})
		require.Empty(t, w.New())
		require.Empty(t, w.Left())
	}
	return as, rs
}

func oneHost(n, restarts int) *job.Config {
	return &job.Config{Job: "elastic", LocalSize: n, MaxRestarts: restarts, Timing: quick, Notify: func(string) {}}
}

// finishAll ends the functions of workers and then their job.
func finishAll(t *testing.T, as []*job.Agent, rs ...*ran) {
	t.Helper()
	for _, r := range rs {
		close(r.finish)
	}
	for _, r := range rs {
		require.NoError(t, r.returned(t))
	}
	done := make(chan error, len(as))
	for _, a := range as {
		go func() { done <- a.Shutdown(t.Context()) }()
	}
	for range as {
		require.NoError(t, <-done)
	}
}

func TestRunAlone(t *testing.T) {
	t.Parallel()
	calls := 0
	require.NoError(t, Run(t.Context(), &RunConfig{Join: &JoinConfig{}}, func(ctx context.Context, w *World) error {
		calls++
		require.NoError(t, w.Step())
		require.NoError(t, w.Set(ctx, "a", []byte("b")))
		require.Equal(t, []int{1, 0, 1}, []int{w.Epoch(), w.Rank(), w.Size()})
		return nil
	}))
	require.Equal(t, 1, calls)
}

// Step returns the end of an epoch only when all ranks have finished the last step: the one that is first must not
// close its group while the others use it.
func TestAllFinishTheLastStep(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 2, 0)
	cfgs[0].LocalSize = 2
	as, errs := startAll(t, cfgs[0])
	require.NoError(t, errors.Join(errs...))
	left := make(chan struct{}) // the first rank has left epoch 1
	ends := make(chan error, 2)
	first := func(ctx context.Context, w *World) error {
		for w.Epoch() == 1 {
			if err := w.Step(); err != nil {
				close(left)
				return err
			}
		}
		return nil
	}
	second := func(ctx context.Context, w *World) error {
		for w.Epoch() == 1 {
			if err := w.Step(); err != nil {
				return err
			}
			<-w.news // the last step is agreed on
			if last := func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.begun == w.until }(); !last {
				continue
			}
			select {
			case <-left:
				ends <- errors.New("the other rank has left while this one is in the last step")
			case <-time.After(200 * time.Millisecond): // nothing tells that the other one waits
			}
		}
		return nil
	}
	for local, fn := range []func(context.Context, *World) error{first, second} {
		j, err := detect(environ(strings.Join(as[0].WorkerEnv(local), " ")))
		require.NoError(t, err)
		j.Notify = func(string) {}
		go func() { ends <- Run(t.Context(), &RunConfig{Join: j}, fn) }()
	}
	b, err := job.Start(t.Context(), cfgs[1])
	require.NoError(t, err)
	r := runWorker(t, b, 0, RunConfig{})
	r.awaitSize(t, 3)
	close(r.finish)
	require.NoError(t, errors.Join(<-ends, <-ends, r.returned(t)))
	for _, a := range []*job.Agent{as[0], b} {
		a.Close()
	}
}

// The survivors of a loss go on with the order of their ranks and a store of their own. The
// lost worker is started again and gets the last rank, at the same step of all others.
func TestEpochs(t *testing.T) {
	t.Parallel()
	cfg := oneHost(3, 1)
	lines := make(chan string, 100)
	cfg.Notify = func(line string) { lines <- line }
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	a := as[0]
	rs := []*ran{runWorker(t, a, 0, RunConfig{}), runWorker(t, a, 1, RunConfig{}), runWorker(t, a, 2, RunConfig{})}
	ws := []*World{rs[0].world(t, 1), rs[1].world(t, 1), rs[2].world(t, 1)}
	require.NoError(t, ws[0].Set(t.Context(), "key", []byte("of epoch 1")))

	rs[1].kill(t, ws[1])
	lost := requireCause[*MemberLostError](t, ws[0].Context())
	require.Equal(t, []any{1, os.Getpid(), 137, "killed by SIGKILL"}, []any{lost.Rank, lost.PID, lost.ExitCode, lost.Reason})
	_, err := ws[0].Get(t.Context(), "key")
	require.ErrorIs(t, err, lost)
	w0, w2 := rs[0].world(t, 2), rs[2].world(t, 2)
	require.Equal(t, []int{0, 2, 1, 2}, []int{w0.Rank(), w0.Size(), w2.Rank(), w2.Size()})
	require.Equal(t, 2, w2.LocalRank())
	for _, w := range []*World{w0, w2} {
		require.Empty(t, w.New())
		require.Len(t, w.Left(), 1)
		require.Equal(t, []any{1, "killed by SIGKILL", false}, []any{w.Left()[0].Rank, w.Left()[0].Reason, w.Left()[0].Planned})
	}
	ok, err := w2.CompareAndSwap(t.Context(), "key", nil, []byte("of epoch 2"))
	require.NoError(t, err)
	require.True(t, ok, "the store of an epoch is empty at its beginning")
	require.Eventually(t, func() bool { return slices.Equal([]int{0, -1, 1}, []int{a.Rank(0), a.Rank(1), a.Rank(2)}) },
		time.Minute, time.Millisecond, "the launcher has the news")

	<-rs[0].steps
	<-rs[2].steps
	require.Equal(t, job.Order{Local: 1, Start: true, Count: 1}, orderOf(t, a))
	back := runWorker(t, a, 1, RunConfig{})
	w0, w2 = rs[0].world(t, 3), rs[2].world(t, 3)
	w1 := back.world(t, 3)
	require.Equal(t, <-rs[0].steps, <-rs[2].steps, "both have ended at the same step")
	require.Equal(t, []int{0, 1, 2}, []int{w0.Rank(), w2.Rank(), w1.Rank()})
	require.Equal(t, 1, w1.LocalRank())
	require.Equal(t, []int{2}, w0.New())
	require.True(t, slices.Contains(w1.New(), 2))
	require.Empty(t, w0.Left())

	// Without budget the world stays small.
	back.kill(t, w1)
	require.Equal(t, job.Order{Local: 1}, orderOf(t, a))
	rs[0].world(t, 4)
	rs[2].world(t, 4)
	finishAll(t, as, rs[0], rs[2])
	var text []string
	for len(lines) > 0 {
		if line := <-lines; strings.HasPrefix(line, "job elastic: epoch ") { // a busy machine may have others, such as that the job waits
			text = append(text, line)
		}
	}
	require.Len(t, text, 3)
	require.Regexp(t, `^job elastic: epoch 2: 2 processes on 1 host; rank 1 \(host \S+ pid \d+\) left: killed by SIGKILL; the job stood still for [\d.]+m?s$`, text[0])
	require.Regexp(t, `^job elastic: epoch 3: 3 processes on 1 host; rank 2 \(host \S+ pid \d+\) joined; the job stood still for `, text[1])
}

// The minimum ends the job if no worker is started again.
func TestMinimum(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, oneHost(2, 0))
	require.NoError(t, errors.Join(errs...))
	rs := []*ran{runWorker(t, as[0], 0, RunConfig{MinSize: 2}), runWorker(t, as[0], 1, RunConfig{MinSize: 2})}
	rs[0].world(t, 1)
	rs[1].kill(t, rs[1].world(t, 1))
	e, ok := errors.AsType[*MemberLostError](rs[0].returned(t))
	require.True(t, ok)
	require.Equal(t, 1, e.Rank)
	requireCause[*MemberLostError](t, as[0].Context())
}

// With a budget, the survivors wait for the worker that is started again.
func TestWaitForMinimum(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, oneHost(2, 1))
	require.NoError(t, errors.Join(errs...))
	rc := RunConfig{MinSize: 2}
	rs := []*ran{runWorker(t, as[0], 0, rc), runWorker(t, as[0], 1, rc)}
	w := rs[0].world(t, 1)
	rs[1].kill(t, rs[1].world(t, 1))
	requireCause[*MemberLostError](t, w.Context())
	require.True(t, orderOf(t, as[0]).Start)
	back := runWorker(t, as[0], 1, rc)
	w = rs[0].world(t, 2)
	require.Equal(t, []int{1}, w.New())
	require.Len(t, w.Left(), 1)
	back.world(t, 2)
	finishAll(t, as, rs[0], back)
}

// A function that does not return after its epoch is killed, and does not hold up the others.
func TestRevokeIsBounded(t *testing.T) {
	t.Parallel()
	cfg := oneHost(3, 0)
	cfg.Timing.Revoke = 5 * time.Second // a busy machine needs some of it for the function that returns
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	var rs []*ran
	var ws []*World
	for local := range 3 {
		rs = append(rs, newRan(as[0], local))
	}
	rs[2].deaf = make(chan struct{})
	defer close(rs[2].deaf)
	for _, r := range rs {
		r.start(t, RunConfig{})
	}
	for _, r := range rs {
		ws = append(ws, r.world(t, 1))
	}
	rs[0].kill(t, ws[0])
	require.Equal(t, job.Order{Local: 0}, orderOf(t, as[0]))
	require.Equal(t, job.Order{Local: 2, PID: os.Getpid(), Kill: true}, orderOf(t, as[0]))
	w := rs[1].world(t, 2)
	require.Equal(t, []int{0, 1}, []int{w.Rank(), w.Size()})
	left := w.Left()
	slices.SortFunc(left, func(a, b Departure) int { return a.Rank - b.Rank })
	require.Equal(t, []int{0, 2}, []int{left[0].Rank, left[1].Rank})
	require.Equal(t, "its function did not return within 5s after the end of epoch 1", left[1].Reason)
	finishAll(t, as, rs[1])
}

// A process whose function fails leaves the job with its error as the reason.
func TestFunctionFails(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, oneHost(2, 0))
	require.NoError(t, errors.Join(errs...))
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(1), " ")))
	require.NoError(t, err)
	boom := errors.New("a bug")
	failed := make(chan error, 1)
	go func() {
		failed <- Run(t.Context(), &RunConfig{Join: j}, func(context.Context, *World) error { return boom })
	}()
	r := runWorker(t, as[0], 0, RunConfig{})
	r.world(t, 1)
	w := r.world(t, 2)
	require.Equal(t, "its function failed: a bug", w.Left()[0].Reason)
	require.ErrorIs(t, <-failed, boom)
	finishAll(t, as, r)
}

// Functions that have returned nil are called again if the epoch ends before the others have.
func TestFinishTogether(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, oneHost(3, 0))
	require.NoError(t, errors.Join(errs...))
	rs := []*ran{runWorker(t, as[0], 0, RunConfig{}), runWorker(t, as[0], 1, RunConfig{}), runWorker(t, as[0], 2, RunConfig{})}
	rs[0].world(t, 1)
	rs[1].world(t, 1)
	w := rs[2].world(t, 1)
	close(rs[0].finish)
	<-rs[0].steps
	rs[2].kill(t, w)
	rs[0].world(t, 2)
	rs[1].world(t, 2)
	close(rs[1].finish)
	require.NoError(t, rs[0].returned(t))
	require.NoError(t, rs[1].returned(t))
}

// Attach and Run exclude each other in a job.
func TestRunIsForAll(t *testing.T) {
	t.Parallel()
	as, rs := elasticJob(t, RunConfig{}, oneHost(1, 0))
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(0), " ")))
	require.NoError(t, err)
	_, err = Join(t.Context(), j)
	require.ErrorContains(t, err, "the processes of this job call cluster.Run")
	finishAll(t, as, rs...)
}

// cluster returns configs of hosts with one worker each.
func elasticHosts(t *testing.T, least, most, restarts int) []*job.Config {
	cfgs := onLoopback(t, most, 1)
	for _, c := range cfgs {
		c.MinNodes, c.LocalSize, c.MaxRestarts = least, 1, restarts
	}
	return cfgs
}

// A job starts with the least number of hosts. Others join, are lost and come back.
func TestHostsComeAndGo(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 2, 0)
	as, rs := elasticJob(t, RunConfig{}, cfgs[0])
	b, err := job.Start(t.Context(), cfgs[1])
	require.NoError(t, err)
	rb := runWorker(t, b, 0, RunConfig{})
	w := rs[0].world(t, 2)
	require.Equal(t, []int{0, 2, 0}, []int{w.Rank(), w.Size(), w.Node()})
	wb := rb.world(t, 2)
	require.Equal(t, []int{1, 1}, []int{wb.Rank(), wb.Node()})
	require.Equal(t, 2, as[0].Nodes())

	b.Client().CloseConnection() // its launcher is killed
	wb.calls.(job.Remote).Client.CloseConnection()
	w = rs[0].world(t, 3)
	require.Equal(t, 1, w.Size())
	require.Contains(t, w.Left()[0].Reason, "its connection closed")
	rb.returned(t)
	b.Close()

	b, err = job.Start(t.Context(), cfgs[1])
	require.NoError(t, err)
	defer b.Close()
	rb = runWorker(t, b, 0, RunConfig{})
	require.Equal(t, 2, rs[0].world(t, 4).Size())
	rb.world(t, 4)
	finishAll(t, []*job.Agent{as[0], b}, rs[0], rb)
}

// A host that is drained leaves at the end of a step, and the last host stops the job.
func TestDrain(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 2, 0)
	as, rs := elasticJob(t, RunConfig{}, cfgs...)
	require.Eventually(t, as[1].CanDrain, time.Minute, time.Millisecond)
	require.NoError(t, as[1].Drain("received SIGTERM", 143))
	require.ErrorIs(t, rs[1].returned(t), ErrDismissed)
	w := rs[0].world(t, 2)
	require.Equal(t, <-rs[0].steps, <-rs[1].steps)
	require.Equal(t, 1, w.Size())
	require.Equal(t, "its launcher received SIGTERM", w.Left()[0].Reason)
	require.True(t, w.Left()[0].Planned)
	require.Equal(t, job.Order{Stop: true}, orderOf(t, as[1]))
	require.NoError(t, as[1].Close())
	require.NoError(t, as[0].Drain("received SIGTERM", 143))
	require.Equal(t, 143, requireCause[*StopError](t, as[0].Context()).ExitCode)
	require.NoError(t, as[0].Close())
	require.Error(t, rs[0].returned(t))
}

// The host that coordinates is drained. It leaves at the end of a step like any other, and another host
// coordinates.
func TestDrainCoordinator(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 3, 0)
	for _, c := range cfgs {
		c.Timing.LostAfter = time.Minute // a host that is slow for half of it joins one epoch later
	}
	as, rs := elasticJob(t, RunConfig{}, cfgs...)
	require.Eventually(t, as[0].CanDrain, time.Minute, time.Millisecond)
	require.NoError(t, as[0].Drain("received SIGTERM", 143))
	require.ErrorIs(t, rs[0].returned(t), ErrDismissed)
	require.Equal(t, job.Order{Stop: true}, orderOf(t, as[0]))
	steps := <-rs[0].steps
	for _, r := range rs[1:] {
		w := r.awaitSize(t, 2)
		require.Equal(t, steps, <-r.steps)
		require.Len(t, w.Left(), 1)
		require.Equal(t, "its launcher received SIGTERM", w.Left()[0].Reason)
		require.True(t, w.Left()[0].Planned)
	}
	require.NoError(t, as[0].Close())
	finishAll(t, as[1:], rs[1:]...)
}

// Without launchers, the process of rank 0 coordinates. A lost process may come again by itself.
func TestEpochsWithoutLaunchers(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	start := func(rank int) *ran {
		r := &ran{local: rank, worlds: make(chan *World, 100), steps: make(chan int, 100), finish: make(chan struct{}), result: make(chan error, 1)}
		j := &JoinConfig{Job: "bare", Size: 3, Rank: &rank, Addr: addr, Serve: rank == 0, Secret: testSecret, Timing: quick, Notify: func(string) {}}
		go func() { r.result <- Run(t.Context(), &RunConfig{Join: j}, r.work) }()
		return r
	}
	rs := []*ran{start(0), start(1), start(2)}
	rs[0].world(t, 1)
	w := rs[1].world(t, 1)
	rs[2].world(t, 1)
	w.calls.(job.Remote).Client.CloseConnection()
	require.Error(t, rs[1].returned(t))
	require.Equal(t, 2, rs[0].world(t, 2).Size())
	require.Equal(t, 1, rs[2].world(t, 2).Rank())
	back := start(1)
	require.Equal(t, []int{2}, rs[0].world(t, 3).New())
	require.Equal(t, 2, back.world(t, 3).Rank())
	require.Equal(t, 1, rs[2].world(t, 3).Rank())
	finishAll(t, nil, rs[0], rs[2], back)
}

// A host that is a smaller seed than the coordinator joins the running job.
func TestSmallerSeedJoinsTheRunningJob(t *testing.T) {
	t.Parallel()
	cfgs := onLoopback(t, 2, 2)
	for _, c := range cfgs {
		c.MinNodes, c.LocalSize = 1, 1
	}
	as, rs := elasticJob(t, RunConfig{}, cfgs[1])
	require.Equal(t, cfgs[0].Seeds[1], as[0].Addr)
	b, err := job.Start(t.Context(), cfgs[0])
	require.NoError(t, err)
	defer b.Close()
	require.Equal(t, as[0].Addr, b.Addr)
	rb := runWorker(t, b, 0, RunConfig{})
	require.Equal(t, 0, rs[0].world(t, 2).Rank())
	require.Equal(t, 1, rb.world(t, 2).Rank())
	finishAll(t, []*job.Agent{as[0], b}, rs[0], rb)
}

// TestLeftWithAMissedEpoch checks that a process which learns nothing of epoch 2 finds its departures in epoch 3, without a
// process that epoch 3 has or names itself.
func TestLeftWithAMissedEpoch(t *testing.T) {
	l, _ := net.Pipe()
	k := &job.Client{Stream: job.NewStream(&job.Link{Conn: l}, job.NewRunClock(time.Second), time.Second), Clock: job.NewRunClock(time.Second)}
	k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
	r := &runner{cfg: &JoinConfig{}, parent: t.Context(), k: k, worlds: make(chan *World, 3), end: make(chan error, 1)}
	begin := func(epoch uint64, w job.World) *World {
		m := job.Note(job.KindWorld, w)
		m.Epoch = epoch
		r.event(k, m)
		return <-r.worlds
	}
	at := func(rank int, host string, pid int) Member { return Member{Rank: rank, Host: host, PID: pid} }
	begin(1, job.World{Members: []Member{at(0, "a", 1), at(1, "b", 1), at(2, "c", 1)}})
	w := begin(3, job.World{Members: []Member{at(0, "a", 1), at(1, "d", 1)}, Left: []Departure{{Member: at(1, "c", 1), Reason: "killed by SIGKILL"}}})
	require.Equal(t, []Departure{
		{Member: at(1, "c", 1), Reason: "killed by SIGKILL"},
		{Member: at(1, "b", 1), Reason: "left after epoch 1; the reason is unknown, because this process missed epoch 2"},
	}, w.Left())
	w = begin(4, job.World{Members: []Member{at(0, "a", 1)}})
	require.Empty(t, w.Left(), "no epoch is missed")
}

// FuzzWorkerEvents gives a worker messages that a coordinator may send.
func FuzzWorkerEvents(f *testing.F) {
	add := func(k job.Kind, id uint64, v any) {
		m := job.Note(k, v)
		m.ID = id
		f.Add(m.Encode())
	}
	members := []Member{{Rank: 0, Host: "a"}, {Rank: 1, Host: "b", Node: 1}}
	add(job.KindWorld, 1, job.World{Members: members, New: []int{1}, Left: []Departure{{Member: members[0], Reason: "killed"}}})
	add(job.KindWorld, 9, job.World{Members: members})
	add(job.KindWorld, 1, job.World{Members: slices.Repeat(members, 100)}) // packed
	add(job.KindRevoke, 0, job.Fault{Rank: 1, Reason: "killed"})
	add(job.KindUntil, 3, nil)
	add(job.KindFault, 0, job.Fault{Rank: -1, Again: true})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := job.DecodeMessage(b)
		if err != nil {
			return
		}
		l, _ := net.Pipe()
		k := &job.Client{Stream: job.NewStream(&job.Link{Conn: l}, job.NewRunClock(time.Second), time.Second), Clock: job.NewRunClock(time.Second)}
		k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
		r := &runner{cfg: &JoinConfig{}, parent: t.Context(), k: k, worlds: make(chan *World, 2), end: make(chan error, 1)}
		r.event(k, job.Note(job.KindWorld, job.World{Members: []Member{{Host: "a"}}}))
		r.event(k, m)
	})
}
