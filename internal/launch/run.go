// Package launch starts the workers of one host and supervises them. It assigns
// ranks through package cluster, writes the workers' output line by line, and
// forwards signals. If a worker fails, it stops the whole job, reports the first
// failure and its cause, and leaves no process behind.
//
// Run turns the calling process into the reaper of all its descendants, and kills the
// remaining ones at the end. Therefore only a command should call it.
package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
)

const (
	// verdictWait is the time that the launcher waits for the reason after it
	// lost the connection to the coordinator.
	verdictWait = time.Second
	// drainWait limits the reading from pipes after all workers were killed.
	drainWait = 2 * time.Second
	// oomEvery is the time between two readings of the counter of out-of-memory kills.
	oomEvery = 10 * time.Second
)

// A launcher is a running Run.
type launcher struct {
	cfg    Config
	agent  *job.Agent
	out    *output
	guard  *guardian // or nil
	ooms   oomWatch
	limits pidLimit

	path     string // of the program
	restarts int    // how often all workers were started again
	children []*child
	ended    chan *child
	running  int
	elastic
	pipes []*os.File

	signal   syscall.Signal // the first signal that asked us to stop, or 0
	stopping bool
	grace    *time.Timer
	late     *time.Timer // ends the time in which workers exit by themselves

	sayMu sync.Mutex
}

// Run starts the workers of this host, waits until the job ends, and returns
// the exit code. It writes all messages to cfg.Stderr. When ctx ends, it acts
// as on a SIGTERM to this launcher. If the calling program is killed, the
// kernel kills the workers; if the program called Guard, the process groups of
// the workers are killed, too.
func Run(ctx context.Context, cfg *Config) int {
	c, err := cfg.complete()
	j := &launcher{cfg: c, ooms: oomWatch{path: vmstat, cgroup: cgroupEvents()}}
	if err != nil {
		j.cfg = *cfg
		j.fail(err.Error())
		return ExitUsage
	}
	path, code, err := program(c.Program[0])
	if err != nil {
		j.fail(err.Error())
		j.excuse(ctx, err)
		return code
	}
	if c.Devices.Note != "" {
		j.say(c.Devices.Note)
	}
	if err := j.limits.check(c.Procs); err != nil {
		j.fail(err.Error())
		j.excuse(ctx, err)
		return ExitUnavailable
	}
	becomeReaper()
	guard := j.startGuardian()
	defer j.signalAtEnd(ctx)()
	code, err = j.meet(context.WithoutCancel(ctx))
	j.guard = <-guard
	defer j.guard.dismiss()
	defer reap()()
	if err != nil {
		j.fail(err.Error())
		return code
	}
	defer j.agent.Close()
	if c.Joined != nil {
		defer c.Joined(j.agent)()
	}
	return j.run(path)
}

// signalAtEnd sends SIGTERM to this launcher when ctx ends, until stop is called.
func (j *launcher) signalAtEnd(ctx context.Context) (stop func()) {
	signals, over := make(chan os.Signal), make(chan struct{})
	from, ended := j.cfg.Signals, ctx.Done()
	j.cfg.Signals = signals
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			var s os.Signal
			select {
			case s = <-from:
			case <-ended:
				s, ended = syscall.SIGTERM, nil
			case <-over:
				return
			}
			select {
			case signals <- s:
			case <-over:
				return
			}
		}
	})
	return func() { close(over); wg.Wait() }
}

// excuseTime is the time for the launchers of other hosts to start after this one.
const excuseTime = time.Minute

// excuse tells the other hosts of the job that this host cannot take part, so that they do not wait
// for it.
func (j *launcher) excuse(ctx context.Context, why error) {
	if j.cfg.Cluster.Nodes < 2 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, excuseTime)
	defer cancel()
	j.cfg.Cluster.Unfit = why.Error()
	if _, err := j.meet(ctx); err == nil {
		j.agent.Close()
	}
}

// startGuardian starts the guardian in the background, because that takes as
// long as a rendezvous on one host. The channel delivers nil if the guardian
// cannot start.
func (j *launcher) startGuardian() <-chan *guardian {
	started := make(chan *guardian, 1)
	go func() {
		g, err := startGuardian()
		if err != nil {
			j.warn(fmt.Sprintf("cannot start the guardian, so kill -9 of this launcher may leave processes running: %v", err))
		}
		started <- g
	}()
	return started
}

// run runs the workers of a job that all hosts have joined, and returns the exit code.
func (j *launcher) run(path string) int {
	j.path = path
	out, err := newOutput(&j.cfg, j.agent.Job(), j.warn)
	if err != nil {
		j.fail(err.Error())
		return ExitFailed
	}
	j.sayMu.Lock()
	j.out, j.cfg.Cluster.Job, j.cfg.Cluster.Host = out, j.agent.Job(), j.agent.Host()
	j.sayMu.Unlock()
	if self, others := j.agent.Namesakes(); others != "" {
		j.warn(fmt.Sprintf("warning: several launchers of the job count as hosts, and all are named %s: this one (%s) and %s; on one machine, their ranks would use the same GPUs. "+
			"Start one launcher on each machine, or give each its name by %s", j.agent.Host(), self, others, env.HostName.Name))
	}
	defer j.out.close()
	for {
		code, err := j.attempt()
		if err != nil {
			j.fail(err.Error())
			return code
		}
		if !j.restarting() {
			if code == 0 && j.out.lost.Load() {
				return ExitFailed
			}
			return j.reportCause(code)
		}
		j.quoteCause()
		if err := j.awaitRestart(); err != nil {
			return j.notRestarted(err)
		}
	}
}

// attempt starts all workers, and returns when all have exited.
func (j *launcher) attempt() (code int, err error) {
	j.children, j.running, j.stopping, j.elastic = nil, 0, false, elastic{due: make(chan job.Order, j.cfg.Procs)}
	j.ooms.begin()
	if code, err = j.spawn(); err != nil {
		j.kill("because another rank could not be started")
	} else {
		code = j.supervise()
	}
	for ; j.running > 0; j.running-- {
		(<-j.ended).finish()
	}
	j.countAll()
	j.cleanUp()
	return code, err
}

// say writes one line of the launcher itself.
func (j *launcher) say(text string) { j.log("INFO", nil, text) }

func (j *launcher) warn(text string) { j.log("WARN", nil, text) }
func (j *launcher) fail(text string) { j.log("ERROR", nil, text) }

// log writes one line of a level, about a worker unless about is nil.
func (j *launcher) log(level string, about *child, text string) {
	j.sayMu.Lock()
	defer j.sayMu.Unlock()
	if j.out != nil {
		j.out.err.endLine()
	}
	var rank *int
	if about != nil {
		rank = &about.rank
	}
	j.cfg.Log(level, rank, strings.TrimPrefix(text, "cluster: "))
}

// meet waits for the other hosts, until a signal aborts the wait.
func (j *launcher) meet(ctx context.Context) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cfg := j.cfg.Cluster
	cfg.Notify = j.say
	met := make(chan error, 1)
	go func() {
		var err error
		j.agent, err = job.Start(ctx, &cfg)
		met <- err
	}()
	for {
		select {
		case err := <-met:
			return meetCode(err), err
		case s := <-j.cfg.Signals:
			sig, ok := s.(syscall.Signal)
			if !ok || sig == syscall.SIGUSR1 || sig == syscall.SIGUSR2 {
				continue
			}
			cancel()
			if err := <-met; err == nil {
				j.agent.Close()
			}
			return exitSignalOffset + int(sig), fmt.Errorf("received %s before the job started", signalName(sig))
		}
	}
}

// meetCode returns the exit code for a failed rendezvous.
func meetCode(err error) int {
	var timeout *job.JoinTimeoutError
	var auth *job.AuthError
	var config *job.ConfigError
	var duplicate *job.DuplicateError
	var refused *job.RefusedError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &timeout):
		return ExitUnavailable
	case errors.As(err, &auth):
		return ExitAuth
	case errors.As(err, &config), errors.As(err, &duplicate), errors.As(err, &refused):
		return ExitUsage
	}
	return ExitFailed
}

// spawn starts all workers.
func (j *launcher) spawn() (int, error) {
	j.ended = make(chan *child, j.cfg.Procs)
	var all []*child
	for local := range j.cfg.Procs {
		c := j.newChild(local)
		if err := j.out.openLogs(c, j.agent.Host()); err != nil {
			return ExitFailed, err
		}
		all = append(all, c)
	}
	for _, c := range all {
		if err := j.start(c); err != nil {
			return startCode(err), fmt.Errorf("start %s: %w", c.name(), j.limits.explain(whyNot(j.path, err)))
		}
		j.children = append(j.children, c)
	}
	return 0, nil
}

// startCode returns the exit code for a worker that could not be started. Only a program that the kernel refuses is a mistake that
// another attempt repeats.
func startCode(err error) int {
	exec, ok := errors.AsType[*os.PathError](err)
	exhausted := slices.ContainsFunc([]error{syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE}, func(e error) bool { return errors.Is(err, e) })
	if ok && exec.Op == "fork/exec" && !exhausted {
		return ExitNotRunnable
	}
	return ExitFailed
}

func (j *launcher) newChild(local int) *child {
	c := &child{local: local, rank: j.agent.Rank(local), again: j.restarts}
	c.late = c.rank < 0
	c.rankNow = func() int { return j.agent.Rank(local) }
	c.shown.Store(int64(c.rank))
	return c
}

// start starts a worker.
func (j *launcher) start(c *child) error {
	c.known = make(chan struct{})
	defer close(c.known)
	stdout, r1, err := j.out.pipe(c, false)
	if err != nil {
		return err
	}
	// The worker has a copy once it runs.
	defer stdout.Close()
	j.pipes = append(j.pipes, r1)
	stderr, r2, err := j.out.pipe(c, true)
	if err != nil {
		return err
	}
	defer stderr.Close()
	j.pipes = append(j.pipes, r2)
	c.cmd = command(j.path, j.cfg.Program, append(j.cfg.workerEnv(j.agent, c.local), c.env...), stdout, stderr)
	if err := startChild(c, j.ended); err != nil {
		return err
	}
	j.guard.started(c.pid)
	j.running++
	if c.again > 0 && j.cfg.Restarted != nil {
		j.cfg.Restarted()
	}
	return nil
}

// supervise returns when all workers of this host have exited and, if none
// failed, the workers of the other hosts, too.
func (j *launcher) supervise() int {
	j.grace = stoppedTimer()
	defer j.grace.Stop()
	ooms := time.NewTicker(oomEvery)
	defer ooms.Stop()
	dead, killed := j.agent.Context().Done(), j.agent.Killed()
	j.late = stoppedTimer()
	defer j.late.Stop()
	var stay <-chan time.Time
	for stayed := false; j.running > 0 || j.mayStart() || j.mustStay() && !stayed; {
		if j.running == 0 && j.draining && stay == nil {
			stay = time.After(j.cfg.Grace)
		}
		select {
		case <-stay:
			stay, stayed = time.After(j.cfg.Grace), !j.agent.Needed()
		case c := <-j.ended:
			j.childEnded(c)
		case o := <-j.agent.Orders():
			j.obey(o)
		case o := <-j.due:
			j.startAgain(o)
		case s := <-j.cfg.Signals:
			j.signalled(s)
		case <-dead:
			dead = nil
			if lost, _ := j.causes(); lost != nil && !j.agent.Restarting() {
				j.late.Reset(j.cfg.Grace)
			} else {
				j.ask()
			}
		case <-j.late.C:
			j.ask()
		case <-j.grace.C:
			j.kill(fmt.Sprintf("after the grace period of %v", j.cfg.Grace))
		case <-killed:
			killed = nil
			j.kill("because a launcher of the job received a second signal")
		case <-ooms.C:
			j.ooms.update()
		}
		if dead == nil && j.onlyLost() {
			j.ask()
		}
	}
	if !j.over() {
		j.awaitOthers()
	}
	return j.verdict()
}

// stoppedTimer returns a timer for Reset.
func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// onlyLost reports whether no worker is left that could exit: each one that still runs is the lost
// one, or SIGSTOP stopped it, too.
func (j *launcher) onlyLost() bool {
	lost, _ := j.causes()
	if lost == nil {
		return false
	}
	first := j.childOf(lost)
	return first != nil && first.running && !slices.ContainsFunc(j.children, func(c *child) bool {
		return c.running && c != first && !job.ProcessOf(c.pid).IsStopped()
	})
}

// over reports whether the job was stopped or has failed.
func (j *launcher) over() bool { return j.stopping || j.agent.Context().Err() != nil }

func (j *launcher) childEnded(c *child) {
	c.finish()
	j.running--
	if errors.Is(syscall.Kill(-c.pid, 0), syscall.ESRCH) {
		j.guard.ended(c.pid)
	}
	// The agent's context reports a failure back to us, unless another failure
	// was first. If this call fails, the coordinator is lost, and the context
	// reports that.
	c.why = c.reason(&j.ooms)
	if c.code() != 0 && !c.stopped && !c.killed {
		c.why += j.limits.remark()
	}
	_ = j.agent.Report(c.local, job.Exit{PID: c.pid, Code: c.code(), Reason: c.why, Asked: c.stopped})
	if c.code() != 0 && !c.stopped {
		j.undecided++
		return // see countAll
	}
	j.count(c, true)
}

// count reports the exit of a worker to Config.Exited, once.
func (j *launcher) count(c *child, first bool) {
	if j.cfg.Exited != nil && c.state != nil && !c.counted {
		c.counted = true
		j.cfg.Exited(c.exit(first))
	}
}

// countAll counts the failures that were undecided while the coordinator had not named the first one.
func (j *launcher) countAll() {
	lost, stop := j.causes()
	for _, c := range j.children {
		j.count(c, lost == nil && stop == nil || lost != nil && j.childOf(lost) == c)
	}
}

// signalled forwards a signal. The first signal that asks to stop starts the
// grace period, the second ends it.
func (j *launcher) signalled(s os.Signal) {
	sig, ok := s.(syscall.Signal)
	if !ok {
		return
	}
	if sig == syscall.SIGUSR1 || sig == syscall.SIGUSR2 {
		j.each(sig)
		return
	}
	if j.signal != 0 {
		if goesOn := j.draining && j.agent.Context().Err() == nil; !goesOn {
			_ = j.agent.Kill() // as in childEnded
		}
		j.kill("after a second signal, " + signalName(sig))
		return
	}
	j.signal = sig
	if sig == syscall.SIGTERM && j.agent.CanDrain() {
		j.drain()
		return
	}
	if !j.finished { // otherwise the workers of other hosts may do what they do after the program has ended
		_ = j.agent.Stop("received "+signalName(sig), exitSignalOffset+int(sig)) // as in childEnded
	}
	j.stop(sig)
}

// ask stops the workers unless a signal already asked them to: many programs
// treat a second signal as a request to exit immediately.
func (j *launcher) ask() {
	if !j.stopping {
		j.stop(syscall.SIGTERM)
	}
}

// stop asks all workers to exit and starts the grace period.
func (j *launcher) stop(sig syscall.Signal) {
	if !j.stopping {
		j.stopping = true
		for _, c := range j.children {
			c.stopped = c.running
		}
		j.grace.Reset(j.cfg.Grace)
	}
	j.each(sig)
	// A worker stopped by SIGSTOP would not notice the signal.
	j.each(syscall.SIGCONT)
}

// kill kills all workers, and records why as the reason of their exits.
func (j *launcher) kill(why string) {
	for _, c := range j.children {
		if c.running {
			c.killedBecause(why)
		}
	}
	j.each(syscall.SIGKILL)
}

func (j *launcher) each(sig syscall.Signal) {
	for _, c := range j.children {
		c.signal(sig)
	}
}

// awaitOthers is called after the workers of this host have exited. It waits
// until the workers of the other hosts have exited or the job has failed.
func (j *launcher) awaitOthers() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if j.draining && !j.finished {
		cancel() // the other hosts go on
	}
	done := make(chan error, 1)
	go func() { done <- j.agent.Shutdown(ctx) }()
	for {
		select {
		case err := <-done:
			if err != nil { // the reason may arrive a little later
				t := time.NewTimer(verdictWait)
				defer t.Stop()
				select {
				case <-j.agent.Context().Done():
				case <-t.C:
				}
			}
			return
		case s := <-j.cfg.Signals:
			if j.agent.Lingers() {
				cancel()
				continue
			}
			j.signalled(s)
			if j.signal != 0 {
				return
			}
		}
	}
}

// verdict returns the exit code.
func (j *launcher) verdict() int {
	if j.signal != 0 {
		return exitSignalOffset + int(j.signal)
	}
	switch lost, stop := j.causes(); {
	case lost != nil && lost.ExitCode > 0:
		return lost.ExitCode
	case stop != nil:
		return stop.ExitCode
	case lost != nil:
		return codeOfLost(lost, j.childOf(lost))
	}
	return 0
}

// codeOfLost returns the exit code for a worker that was lost. The coordinator may have noticed the loss
// before this launcher noticed the exit. c is nil for workers of other hosts.
func codeOfLost(lost *job.MemberLostError, c *child) int {
	if c != nil && c.failedAlone(lost) {
		return c.code()
	}
	return ExitFailed
}

// causes returns why the job stopped, according to the coordinator.
func (j *launcher) causes() (*job.MemberLostError, *job.StopError) {
	cause := context.Cause(j.agent.Context())
	var lost *job.MemberLostError
	var stop *job.StopError
	errors.As(cause, &lost)
	errors.As(cause, &stop)
	return lost, stop
}

// cleanUp kills all remaining processes and copies the remaining output.
func (j *launcher) cleanUp() {
	killLeftovers()
	drained := make(chan struct{})
	go func() { j.out.wg.Wait(); close(drained) }()
	if !j.over() {
		<-drained
		return
	}
	// A slow reader must not delay the end of the job.
	t := time.NewTimer(drainWait)
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
		for _, p := range j.pipes {
			p.Close()
		}
	}
}
