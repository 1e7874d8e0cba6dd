package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// A simJob is an elastic job of the real code on a simulated network: agents, coordinators, and workers that call Run. Its
// launchers and the functions of its workers are simulated.
type simJob struct {
	*simNet
	cfg simConfig

	mu        sync.Mutex // not held while other locks are taken, except that of the network
	launchers map[string]*simLauncher
	workers   []*simWorker
	lineages  map[string]*simLineage // by the UUID of an agent
	first     *simLineage            // of the first epoch
	counts    map[string]int         // of proposals and commits of that lineage
	triggers  []simFault
	undo      map[int]func() // ends faults that are active
	calm      bool           // no other faults begin
	complete  bool           // functions return nil at their next step
	lastUndo  int
	began     chan struct{} // closed when the first epoch begins
	violated  chan struct{}
	violation string
	begin     time.Time
	events    []string
	all       sync.WaitGroup
	over      bool
	excluded  bool            // a coordinator has excluded a host
	touched   map[string]bool // hosts that a fault has touched
	deciding  []simSet        // of the epochs and proposals of the first lineage
	crashed   bool            // a worker was killed after its function had returned nil
}

// A simLineage is the hosts that belong to one job, from its first epoch on. Hosts that start without knowing of a job may begin
// another one.
type simLineage struct {
	commits  []*simCommit
	restarts int
	ended    bool   // all functions of an epoch have returned nil
	told     uint64 // an epoch in which Run has returned nil
}

// add adds an epoch in the order of numbers, and returns one that it contradicts. A coordinator that others have replaced may get the
// last answer to its proposal late: its epoch then has a smaller term than a later one, and its successor has counted it as begun.
func (l *simLineage) add(x *simCommit) (other *simCommit) {
	for _, o := range l.commits {
		if o.epoch == x.epoch || o.epoch < x.epoch && o.term > x.term || o.epoch > x.epoch && o.term <= x.term {
			other = o
		}
	}
	l.commits = append(l.commits, x)
	slices.SortStableFunc(l.commits, func(a, b *simCommit) int { return cmp.Compare(a.epoch, b.epoch) })
	return other
}

// Epochs and terms grow together. Only a coordinator that was replaced may begin its last epoch after one of its successor.
func TestSimulatedLineage(t *testing.T) {
	l := &simLineage{}
	for _, c := range []simCommit{{epoch: 1, term: 1}, {epoch: 3, term: 2}, {epoch: 2, term: 1}} {
		require.Nil(t, l.add(&c))
	}
	require.Equal(t, uint64(3), l.commits[2].epoch)
	for _, c := range []simCommit{{epoch: 3, term: 2}, {epoch: 3, term: 1}, {epoch: 2, term: 2}, {epoch: 4, term: 1}} {
		other := simLineage{commits: slices.Clone(l.commits)}
		require.NotNil(t, other.add(&c))
	}
}

// A simCommit is an epoch that a coordinator has begun.
type simCommit struct {
	lineage     *simLineage
	epoch, term uint64
	coordinator *simProc
	members     []string
	voterSet    []string
	at          time.Time
	acked       map[string]int  // the last values of the store that were set
	steps       int             // the greatest number of steps of a member
	finished    map[string]bool // members whose functions have returned nil
}

func (c *simCommit) String() string {
	return fmt.Sprintf("epoch %d of [%s], decided by %s on host %s for the hosts [%s]", c.epoch, strings.Join(c.members, " "), c.coordinator.name, c.coordinator.host.name, strings.Join(c.voterSet, " "))
}

// simName returns the name of a host, one letter.
func simName(i int) string { return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[i : i+1] }

func newSimJob(cfg simConfig, faults []simFault) *simJob {
	j := &simJob{simNet: newSimNet(cfg.seed, cfg.latency), cfg: cfg, launchers: map[string]*simLauncher{}, lineages: map[string]*simLineage{},
		counts: map[string]int{}, triggers: faults, undo: map[int]func(){}, touched: map[string]bool{}, began: make(chan struct{}), violated: make(chan struct{}), begin: time.Now()}
	for i := range cfg.hosts + cfg.late {
		j.addHost(simName(i))
	}
	return j
}

// log records an event. The caller holds the lock.
func (j *simJob) log(format string, args ...any) {
	j.events = append(j.events, fmt.Sprintf("%9.6f ", time.Since(j.begin).Seconds())+fmt.Sprintf(format, args...))
}

func (j *simJob) say(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.log(format, args...)
	if strings.Contains(j.events[len(j.events)-1], "please report this") { // an assertion of the real code
		j.violate("%s", fmt.Sprintf(format, args...))
	}
}

// violate records the first violation of an invariant. The caller holds the lock.
func (j *simJob) violate(format string, args ...any) {
	if j.violation == "" {
		j.violation = fmt.Sprintf(format, args...)
		j.log("VIOLATION: %s", j.violation)
		close(j.violated)
	}
}

func (j *simJob) hasFailed() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.violation != ""
}

// watched sees a proposal or a commit of a coordinator, which holds its lock.
func (j *simJob) watched(p *simProc, c job.Change) {
	if p.isDead() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	var ms []string
	for _, m := range c.Members {
		ms = append(ms, nameOf(m))
	}
	if !c.Begun {
		j.log("%s proposes epoch %d of [%s] to the hosts [%s]", p.name, c.Epoch, strings.Join(ms, " "), strings.Join(j.hostsOf(c.Voters), " "))
		if j.lineages[c.Agent] == j.first {
			j.deciding = append(j.deciding, simSet{c.Epoch, j.hostsOf(c.Voters)})
			j.trigger("propose", p.host)
		}
		return
	}
	x := &simCommit{epoch: c.Epoch, term: c.Term, members: ms, voterSet: j.hostsOf(c.Voters), coordinator: p, at: time.Now(), lineage: j.lineages[c.Agent], acked: map[string]int{}, finished: map[string]bool{}}
	for _, u := range c.Voters { // a coordinator that has taken over as a late host was in no epoch before
		if x.lineage == nil {
			x.lineage = j.lineages[u]
		}
	}
	if x.lineage == nil {
		x.lineage = &simLineage{}
		if j.first == nil {
			j.first = x.lineage
			close(j.began)
		}
	}
	j.log("%s begins %v", p.name, x)
	for _, u := range c.Voters { // the last job that a host has joined, if its own one has ended
		j.lineages[u] = x.lineage
	}
	if o := x.lineage.add(x); o != nil {
		j.violate("%v, after %v", x, o)
	}
	if told := x.lineage.told; told > 0 && x.epoch > told {
		j.violate("%v, after Run has returned nil in epoch %d", x, told)
	}
	if x.lineage == j.first {
		j.deciding = append(j.deciding, simSet{x.epoch, x.voterSet})
		j.trigger("commit", p.host)
	}
}

func nameOf(m Member) string { return fmt.Sprintf("%s/%d#%d", m.Host, m.LocalRank, m.PID) }

// hostsOf names the hosts of agents.
func (j *simJob) hostsOf(uuids []string) (out []string) {
	for _, u := range uuids {
		name := "?"
		for _, l := range j.launchers {
			if l.uuid == u {
				name = l.host.name
			}
		}
		out = append(out, name)
	}
	return out
}

// trigger begins the faults that follow the next event of a kind. The caller holds the lock.
func (j *simJob) trigger(event string, host *simHost) {
	j.counts[event]++
	if event == "commit" && j.counts[event] == 1 {
		for _, f := range j.triggers {
			if f.event == "" {
				time.AfterFunc(f.after, func() { j.apply(f, host) })
			}
		}
	}
	for _, f := range j.triggers {
		if f.event == event && f.count == j.counts[event] {
			time.AfterFunc(f.after+time.Nanosecond, func() { j.apply(f, host) })
		}
	}
}

// A simLauncher is a launcher with its agent, as package launch has it.
type simLauncher struct {
	job   *simJob
	host  *simHost
	proc  *simProc
	uuid  string
	agent *job.Agent // nil while it starts; guarded by simJob.mu
	err   error      // of Start, or why its job has ended
	over  bool       // it has ended by itself; guarded by simJob.mu

	excused bool // it has failed, and its host might
	term    chan struct{}
	ended   chan simExit
	due     chan job.Order

	workers   map[int]*simWorker
	running   int
	undecided int
	scheduled int
	draining  bool
	dismissed bool
	finished  bool
	stopping  bool
}

type simExit struct {
	worker *simWorker
	code   int
}

// launch starts the launcher of a host.
func (j *simJob) launch(h *simHost) {
	l := &simLauncher{job: j, host: h, proc: h.start("launcher " + h.name), term: make(chan struct{}, 4), ended: make(chan simExit, 64), due: make(chan job.Order, 64), workers: map[int]*simWorker{}}
	l.proc.sys.Watch = func(c job.Change) { j.watched(l.proc, c) }
	j.mu.Lock()
	if old := j.launchers[h.name]; old != nil {
		l.proc.name += "'"
		j.launchers[fmt.Sprint(h.name, " before ", len(j.launchers))] = old
	}
	j.launchers[h.name] = l
	j.mu.Unlock()
	j.all.Go(l.main)
}

func (l *simLauncher) config() *job.Config {
	cfg := &l.job.cfg
	c := &job.Config{Job: "sim", Nodes: cfg.hosts + cfg.late, MinNodes: cfg.least, LocalSize: cfg.local, MaxRestarts: cfg.restarts, Host: l.host.name,
		Bind: l.host.ip, Secret: testSecret, NoGossip: true, Timing: cfg.timing(), Sys: l.proc.sys,
		Notify: func(line string) {
			if !l.proc.isDead() {
				l.job.say("%s: %s", l.proc.name, line)
				if strings.Contains(line, " is excluded for ") {
					l.job.mu.Lock()
					l.job.excluded = true
					l.job.mu.Unlock()
				}
			}
		}}
	for i := range cfg.seeds {
		c.Seeds = append(c.Seeds, "host-"+simName(i))
	}
	return c
}

func (l *simLauncher) main() {
	j := l.job
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-l.proc.died:
			cancel()
		case <-ctx.Done():
		}
	}()
	a, err := job.Start(ctx, l.config())
	if err == nil {
		j.mu.Lock()
		l.agent, l.uuid = a, a.UUID
		j.mu.Unlock()
		err = l.supervise(ctx, a)
		a.Close()
	}
	l.proc.run()
	j.mu.Lock()
	l.err, l.over = err, !l.proc.isDead()
	l.excused = err != nil && j.mayFail(l)
	if l.over {
		j.log("%s ends: %v", l.proc.name, err)
		if err == nil && !l.draining && !l.stopping && !j.hasEnded(l) {
			j.violate("%s ends without an error, but the program has not ended", l.proc.name)
		}
	}
	j.mu.Unlock()
	l.killAll(false)
}

// killAll ends the launcher's process, and the kernel ends its workers.
func (l *simLauncher) killAll(power bool) {
	l.proc.kill(power)
	l.job.mu.Lock()
	ws := slices.Clone(l.job.workers)
	l.job.mu.Unlock()
	for _, w := range ws {
		if w.launcher == l {
			w.proc.kill(power)
		}
	}
}

// supervise runs the workers of the host until none is left, and returns why the job has ended here.
func (l *simLauncher) supervise(ctx context.Context, a *job.Agent) error {
	for local := range l.job.cfg.local {
		l.spawn(a, local)
	}
	dead := a.Context().Done()
	var late, grace <-chan time.Time
	killed := a.Killed()
	ask := func() {
		if !l.stopping {
			l.stopping = true
			grace = time.After(simGrace)
			for _, w := range l.workers {
				w.terminate()
			}
		}
	}
	var stay <-chan time.Time
	for stayed := false; l.running > 0 || !l.isOver(a) && !l.finished && (l.draining && !l.dismissed && !stayed || !l.draining && (l.undecided > 0 || l.scheduled > 0)); {
		if l.running == 0 && l.draining && stay == nil {
			stay = time.After(simGrace)
		}
		select {
		case <-stay:
			l.proc.run()
			stay, stayed = time.After(simGrace), !a.Needed()
		case e := <-l.ended:
			l.proc.run()
			l.running--
			asked := l.stopping || l.draining
			l.job.say("%s: worker %d#%d has exited with code %d", l.proc.name, e.worker.local, e.worker.proc.pid, e.code)
			_ = a.Report(e.worker.local, job.Exit{PID: e.worker.proc.pid, Code: e.code, Asked: asked}) // as in package launch
			if e.code != 0 && !asked {
				l.undecided++
			}
			if l.workers[e.worker.local] == e.worker {
				delete(l.workers, e.worker.local)
			}
		case o := <-a.Orders():
			l.proc.run()
			l.job.say("%s: order %+v", l.proc.name, o)
			switch {
			case o.Finish:
				if l.finished = true; l.draining {
					late = time.After(simGrace)
				}
			case o.Stop:
				l.dismissed = true
				late = time.After(simGrace)
			case o.Kill:
				if w := l.workers[o.Local]; w != nil && w.proc.pid == o.PID {
					w.proc.kill(false)
				}
			case o.Start:
				l.restarted()
				l.undecided--
				l.scheduled++
				time.AfterFunc(o.After, func() { l.due <- o })
			default:
				l.undecided--
			}
		case o := <-l.due:
			l.proc.run()
			l.scheduled--
			if !l.isOver(a) && !l.draining && !l.finished {
				l.spawn(a, o.Local)
			}
		case <-l.term:
			l.proc.run()
			if l.draining || l.stopping {
				break
			}
			if a.CanDrain() {
				l.draining = true
				_ = a.Drain("received SIGTERM", 143)
				break
			}
			if !l.finished {
				_ = a.Stop("received SIGTERM", 143)
			}
			ask()
		case <-dead:
			l.proc.run()
			dead = nil
			if _, lost := errors.AsType[*MemberLostError](context.Cause(a.Context())); lost {
				late = time.After(simGrace)
			} else {
				ask()
			}
		case <-killed:
			l.proc.run()
			killed = nil
			for _, w := range l.workers {
				w.proc.kill(false)
			}
		case <-late:
			l.proc.run()
			ask()
		case <-grace:
			l.proc.run()
			for _, w := range l.workers {
				w.proc.kill(false)
			}
		case <-l.proc.died:
			return errSimDead
		}
	}
	if l.isOver(a) {
		return context.Cause(a.Context())
	}
	if l.draining && !l.finished { // the other hosts go on
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		_ = a.Shutdown(ctx)
		return context.Cause(a.Context())
	}
	return a.Shutdown(ctx)
}

// simGrace is the time of workers to exit.
const simGrace = 3 * time.Second

func (l *simLauncher) isOver(a *job.Agent) bool { return l.stopping || a.Context().Err() != nil }

// A simWorker is a process that calls Run. Its function takes a step now and then, and a while to return.
type simWorker struct {
	launcher *simLauncher
	local    int
	proc     *simProc
	step     time.Duration
	slow     time.Duration
	cancel   context.CancelFunc

	// Guarded by simJob.mu:
	now    *simCommit // of the function that runs; nil if none
	ctx    context.Context
	last   uint64
	stale  time.Duration // for how long it has run in an old epoch
	paused bool          // the coordinator of its epoch was, when that was last checked

	finished bool // its function has returned nil
	failing  bool // its function returns an error at its next step
}

func (l *simLauncher) spawn(a *job.Agent, local int) {
	j := l.job
	w := &simWorker{launcher: l, local: local, proc: l.host.start(fmt.Sprintf("worker %s/%d", l.host.name, local))}
	draw := mix(j.cfg.seed ^ hashOf(w.proc.name) ^ uint64(j.cfg.pace))
	w.step = 20 * time.Millisecond
	switch pace := draw >> 32 % 8; {
	case j.cfg.pace < 0, pace < 2: // at once
	case pace < 5:
		w.slow = time.Duration(draw>>40%500) * time.Millisecond
	case pace == 5:
		w.slow = time.Duration(draw>>40%3000) * time.Millisecond
	default:
		w.slow = j.cfg.lostAfter + time.Duration(draw>>40%3000)*j.cfg.lostAfter/1000
	}
	env := strings.Join(a.WorkerEnv(local), " ")
	l.workers[local] = w
	l.running++
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(context.Background())
	j.mu.Lock()
	j.workers = append(j.workers, w)
	j.mu.Unlock()
	code := make(chan int, 2)
	j.all.Go(func() {
		defer w.cancel()
		if !w.proc.sleep(50*time.Millisecond + time.Duration(draw%100_000)*time.Microsecond) {
			return
		}
		err := w.run(ctx, env)
		if err == nil && w.ends() {
			w.proc.sleep(w.slow / 2)
		}
		if err == nil || errors.Is(err, ErrDismissed) {
			code <- 0
		} else {
			code <- 1
		}
		if !w.proc.isDead() {
			j.say("%s#%d returns from Run: %v", w.proc.name, w.proc.pid, err)
		}
	})
	j.all.Go(func() {
		e := simExit{w, 137}
		select {
		case e.code = <-code:
			w.proc.run()
		case <-w.proc.died:
		}
		w.proc.kill(false)
		w.cancel()
		l.ended <- e
	})
}

func (w *simWorker) run(ctx context.Context, env string) error {
	cfg, err := detect(environ(env))
	if err != nil {
		return err
	}
	cfg.Notify, cfg.sys = func(string) {}, w.proc.sys
	return Run(ctx, &RunConfig{Join: cfg}, w.work)
}

// terminate sends SIGTERM, which ends a program that does not handle it.
func (w *simWorker) terminate() { w.proc.kill(false) }

func (w *simWorker) work(ctx context.Context, world *World) error {
	w.begins(ctx, world)
	defer w.returns()
	for n := 1; ; n++ {
		w.proc.run()
		switch complete, failing := w.fate(); {
		case failing:
			return errSimFunction
		case complete:
			w.proc.sleep(w.slow / 2)
			w.finishes()
			return nil
		}
		if err := world.Step(); err != nil {
			w.proc.sleep(w.slow)
			return err
		}
		if n%4 == 1 {
			w.store(ctx, world, n)
		}
		select {
		case <-ctx.Done():
			w.proc.sleep(w.slow)
			return context.Cause(ctx)
		case <-time.After(w.pause(n)):
		}
	}
}

var errSimFunction = errors.New("an error of the function")

// fate reports whether the function returns now, without an error or with one.
func (w *simWorker) fate() (complete, failing bool) {
	j := w.launcher.job
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.complete, w.failing
}

// finishes records that the function returns nil.
func (w *simWorker) finishes() {
	j := w.launcher.job
	j.mu.Lock()
	defer j.mu.Unlock()
	c := w.now
	if c == nil || w.proc.isDead() {
		return
	}
	j.log("%s#%d has finished in epoch %d", w.proc.name, w.proc.pid, c.epoch)
	c.finished[w.name()], w.finished = true, true
	if t := c.lineage; len(c.finished) == len(c.members) && !t.ended {
		t.ended = true
		j.log("the program has ended")
		if t == j.first {
			j.trigger("end", c.coordinator.host)
		}
	}
}

// ends records that Run has returned nil, and reports whether the process lives.
func (w *simWorker) ends() bool {
	j := w.launcher.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if w.proc.isDead() {
		return false
	}
	if !j.hasEnded(w.launcher) {
		j.violate("Run returns nil in %s#%d, but the program has not ended", w.proc.name, w.proc.pid)
	} else if t := j.lineages[w.launcher.uuid]; t != nil {
		t.told = max(t.told, w.last)
	}
	return true
}

// hasEnded reports whether the program has ended in the job of a launcher, or in any job if the launcher came later. The caller holds
// the lock.
func (j *simJob) hasEnded(l *simLauncher) bool {
	if t := j.lineages[l.uuid]; t != nil {
		return t.ended
	}
	for _, t := range j.lineages {
		if t.ended {
			return true
		}
	}
	return false
}

// pause returns the duration of a step. All members are as fast as the first one, as with collectives, and those that were
// stopped follow soon.
func (w *simWorker) pause(n int) time.Duration {
	j := w.launcher.job
	j.mu.Lock()
	defer j.mu.Unlock()
	c := w.now
	if c == nil {
		return w.step
	}
	c.steps = max(c.steps, n)
	if n < c.steps {
		return time.Millisecond
	}
	return 20*time.Millisecond + time.Duration(mix(j.cfg.seed^hashOf(c.members[0]))%1000)*time.Millisecond
}

// store sets a key, and reads the key of another rank, which must have its last value.
func (w *simWorker) store(ctx context.Context, world *World, n int) {
	j := w.launcher.job
	j.mu.Lock()
	c := w.now
	j.mu.Unlock()
	if c == nil || world.Size() == 1 {
		return
	}
	mine, other := fmt.Sprint("rank ", world.Rank()), fmt.Sprint("rank ", (world.Rank()+1)%world.Size())
	ended := ctx.Err() != nil
	err := world.Set(ctx, mine, []byte(strconv.Itoa(n)))
	j.mu.Lock()
	if err == nil {
		c.acked[mine] = n
		if ended {
			j.violate("%s#%d has set a key after the end of epoch %d", w.proc.name, w.proc.pid, c.epoch)
		}
	}
	least := c.acked[other]
	j.mu.Unlock()
	if err != nil || least == 0 {
		return
	}
	value, err := world.Get(ctx, other)
	if got, _ := strconv.Atoi(string(value)); err == nil && got < least {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.violate("%s#%d reads %d in epoch %d, after %d was set", w.proc.name, w.proc.pid, got, c.epoch, least)
	}
}

// begins checks the world of an epoch.
func (w *simWorker) begins(ctx context.Context, world *World) {
	if w.proc.isDead() {
		return
	}
	j, epoch := w.launcher.job, uint64(world.Epoch())
	j.mu.Lock()
	defer j.mu.Unlock()
	var names []string
	for _, m := range world.Members() {
		names = append(names, nameOf(m))
	}
	j.log("%s#%d begins epoch %d", w.proc.name, w.proc.pid, epoch)
	lineage := j.lineages[w.launcher.uuid]
	if lineage == nil {
		j.violate("%s is in epoch %d of no job", w.proc.name, epoch)
		return
	}
	for _, c := range lineage.commits {
		if c.epoch == epoch && slices.Equal(c.members, names) {
			w.now = c
		}
	}
	switch {
	case w.now == nil:
		j.violate("%s begins epoch %d of [%s], which no coordinator has begun", w.proc.name, epoch, strings.Join(names, " "))
		return
	case epoch <= w.last:
		j.violate("%s begins epoch %d after epoch %d", w.proc.name, epoch, w.last)
	}
	w.last, w.ctx, w.stale = epoch, ctx, 0
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			j.violate("%s has two ranks in epoch %d", name, epoch)
		}
	}
	for _, v := range j.workers {
		if v != w && v.now != nil && v.now.lineage == lineage && v.now.epoch < epoch && slices.Contains(names, v.name()) && !v.proc.isDead() {
			j.violate("%s#%d begins epoch %d while the function of epoch %d runs on %s", w.proc.name, w.proc.pid, epoch, v.now.epoch, v.proc.name)
		}
	}
}

func (w *simWorker) name() string {
	return fmt.Sprintf("%s/%d#%d", w.launcher.host.name, w.local, w.proc.pid)
}

func (w *simWorker) returns() {
	j := w.launcher.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if w.now != nil && !w.proc.isDead() {
		j.log("%s#%d returns from the function of epoch %d", w.proc.name, w.proc.pid, w.now.epoch)
	}
	w.now = nil
}

// isAt reports whether the worker works in an epoch. The caller holds the lock.
func (w *simWorker) isWorking() bool {
	return w.now != nil && w.ctx.Err() == nil && !w.proc.dead && !w.proc.isPaused()
}

const watchEvery = 250 * time.Millisecond

// watch checks now and then that one epoch is alive.
func (j *simJob) watch(ctx context.Context) {
	both := time.Duration(0)
	for job.Sleep(ctx, watchEvery) {
		j.mu.Lock()
		j.simNet.mu.Lock()
		live := j.live()
		if len(live) > 1 {
			if both += watchEvery; both > j.cfg.lostAfter {
				j.violate("two jobs are alive: %v, and %v", live[0], live[1])
			}
		} else {
			both = 0
		}
		for _, w := range j.workers {
			if !w.isWorking() {
				continue
			}
			commits := w.now.lineage.commits
			if last := commits[len(commits)-1]; last.epoch > w.now.epoch {
				paused := w.now.coordinator.isPaused()
				if w.paused && !paused { // it needs the limit again to find out that it is alone
					w.stale = 0
				}
				w.paused = paused
				if w.stale += watchEvery; w.stale > j.slowest+j.cfg.lostAfter+2*time.Second {
					j.violate("%s still works in epoch %d, %v after %v", w.proc.name, w.now.epoch, time.Since(last.at).Round(time.Millisecond), last)
				}
			}
		}
		j.simNet.mu.Unlock()
		j.mu.Unlock()
	}
}

// live returns the epochs of the first job that are alive: all their members work, and their coordinator runs.
func (j *simJob) live() (out []*simCommit) {
	if j.first == nil {
		return nil
	}
	working := map[*simCommit]int{}
	for _, w := range j.workers {
		if w.isWorking() {
			working[w.now]++
		}
	}
	for _, c := range j.first.commits {
		if working[c] == len(c.members) && !c.coordinator.dead && !c.coordinator.isPaused() {
			out = append(out, c)
		}
	}
	return out
}

// restarted counts an order to start a worker again.
func (l *simLauncher) restarted() {
	j := l.job
	j.mu.Lock()
	defer j.mu.Unlock()
	t := j.lineages[l.uuid]
	if t == nil {
		return
	}
	if t.restarts++; t.restarts > j.cfg.restarts && !j.excluded {
		j.violate("%d restarts were ordered, and %d are allowed", t.restarts, j.cfg.restarts)
	}
}

// settles checks, after the last fault, that each launcher belongs to the job that is alive, or has ended, and returns what
// is not so yet. If faults have touched only a minority of the hosts, the launchers of the others must be in the job, or the job
// has gone on with another majority: a host that pauses for almost the limit may be lost for some and not for others. Then the last
// epoch, or one that was proposed since then and may have begun, has few of the others. Those may end, and count as touched.
func (j *simJob) settles() string {
	all := j.coordinators()
	waits := false
	for _, c := range all {
		waits = waits || c.waits
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.simNet.mu.Lock()
	live := j.live()
	j.simNet.mu.Unlock()
	var known []string // hosts
	if len(live) == 1 {
		for l, c := range all {
			if l.proc == live[0].coordinator {
				known = c.hosts
			}
		}
	}
	left := slices.DeleteFunc(j.untouched(), func(host string) bool {
		l := j.launchers[host]
		return l != nil && l.over && l.excused
	})
	majority := len(left) > (j.cfg.hosts+j.cfg.late)/2 && len(left) >= j.cfg.least
	if len(live) == 1 && 2*len(live[0].voterSet) >= j.cfg.hosts {
		majority = false
	}
	for name, l := range j.launchers {
		switch {
		case l.agent == nil || j.lineages[l.uuid] != j.first:
		case majority && slices.Contains(left, name) && (l.over && (l.err != nil && !j.crashed || !j.first.ended) || !l.over && l.proc.isDead()):
			return fmt.Sprintf("no fault has touched the majority %v of the hosts, and %s has ended: %v", left, l.proc.name, l.err)
		case l.over || l.proc.isDead():
		case known == nil:
			if !waits {
				return fmt.Sprintf("%s has not ended, and no epoch is alive", l.proc.name)
			}
		default:
			if !slices.Contains(known, l.uuid) {
				return fmt.Sprintf("%s has not ended, and does not belong to %v", l.proc.name, live[0])
			}
		}
	}
	return ""
}

// untouched returns the hosts that no fault has touched.
func (j *simJob) untouched() (out []string) {
	for i := range j.cfg.hosts {
		if name := simName(i); !j.touched[name] {
			out = append(out, name)
		}
	}
	return out
}

// A simSet is the hosts that decide on the epoch after one that has begun or was proposed.
type simSet struct {
	epoch uint64
	hosts []string
}

// mayFail reports whether the hosts that no fault has touched have no majority in a set that decides for a host: that of the last epoch
// of which the host knows, or a later one that it is in.
func (j *simJob) mayFail(l *simLauncher) bool {
	rest, known := j.untouched(), uint64(0)
	if l.agent != nil {
		known = l.agent.Now.Load().Place.Load().Epoch
	}
	return slices.ContainsFunc(j.deciding, func(set simSet) bool {
		decides := set.epoch == known || set.epoch > known && slices.Contains(set.hosts, l.host.name)
		return decides && 2*len(without(set.hosts, rest)) >= len(set.hosts)
	})
}

// without returns the elements of a that are not in b.
func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(x string) bool { return slices.Contains(b, x) })
}

// A coordinated is what the coordinator in the process of a launcher knows.
type coordinated struct {
	hosts []string // nil: there is none
	waits bool     // for processes
}

// coordinators asks all launchers that live. The lock is not held: an agent that reports something holds its own lock.
func (j *simJob) coordinators() map[*simLauncher]coordinated {
	j.mu.Lock()
	agents := map[*simLauncher]*job.Agent{}
	for _, l := range j.launchers {
		if l.agent != nil && !l.proc.isDead() {
			agents[l] = l.agent
		}
	}
	j.mu.Unlock()
	all := map[*simLauncher]coordinated{}
	for l, a := range agents {
		var c coordinated
		c.hosts, c.waits = a.Coordinated()
		all[l] = c
	}
	return all
}

// stop ends all processes.
func (j *simJob) stop() {
	j.mu.Lock()
	var ls []*simLauncher
	for _, l := range j.launchers {
		ls = append(ls, l)
	}
	j.mu.Unlock()
	for _, l := range ls {
		l.killAll(true)
	}
	j.all.Wait()
}
