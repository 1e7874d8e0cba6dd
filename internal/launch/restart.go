package launch

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
)

// elastic is the part of a job whose workers call job.Run: the coordinator decides
// which of them are started again.
type elastic struct {
	undecided int            // failed workers for which no order has come
	scheduled int            // orders to start a worker that are not due
	ordered   int            // orders to start a worker, in all
	due       chan job.Order // orders to start a worker now
	draining  bool           // this host leaves the job
	dismissed bool           // the others have agreed to go on without it
	finished  bool           // the program has ended on all hosts
}

// mayStart reports whether workers may be started again.
func (j *launcher) mayStart() bool {
	return !j.over() && !j.draining && !j.finished && (j.undecided > 0 || j.scheduled > 0)
}

// mustStay reports whether the others still need this launcher although its workers have exited: it leaves the job, and answers
// the proposal of the epoch without it, or hands over to another coordinator.
func (j *launcher) mustStay() bool { return j.draining && !j.dismissed && !j.finished && !j.over() }

// obey executes a command of the coordinator.
func (j *launcher) obey(o job.Order) {
	switch {
	case o.Finish:
		if j.finished = true; j.draining {
			j.late.Reset(j.cfg.Grace)
		}
	case o.Stop: // the workers know
		j.dismissed = true
		j.late.Reset(j.cfg.Grace)
	case o.Kill:
		if c := j.children[o.Local]; c.pid == o.PID && c.running {
			c.killedBecause("because the coordinator ordered it")
			c.signal(syscall.SIGKILL)
		}
	case o.Start:
		j.count(j.children[o.Local], true)
		j.undecided--
		j.scheduled++
		j.ordered++
		time.AfterFunc(o.After, func() { j.due <- o })
	default:
		j.count(j.children[o.Local], true)
		j.undecided--
		if most := j.cfg.Cluster.MaxRestarts; most > 0 && !j.draining && !j.over() {
			j.say(fmt.Sprintf("worker %d of this host is not started again: the job's restarts are used up (--max-restarts %d)", o.Local, most))
		}
	}
}

// startAgain starts a worker in place of one that has exited.
func (j *launcher) startAgain(o job.Order) {
	j.scheduled--
	if j.over() || j.draining || j.finished {
		return
	}
	c := j.newChild(o.Local)
	c.again, c.rank, c.late = o.Count, max(c.rank, 0), true
	c.shown.Store(-1)
	c.env = []string{fmt.Sprintf("%s=%d", env.RestartCount.Name, o.Count), fmt.Sprintf("TORCHELASTIC_RESTART_COUNT=%d", o.Count)}
	err := j.out.openLogs(c, j.agent.Host())
	if err == nil {
		err = j.start(c)
	}
	if err != nil {
		why := fmt.Sprintf("cannot be started again: %v", j.limits.explain(err))
		j.say(fmt.Sprintf("worker %d of this host %s", o.Local, why))
		j.undecided++ // the coordinator decides whether to try once more
		_ = j.agent.Report(o.Local, job.Exit{Code: startCode(err), Reason: why})
		return
	}
	j.children[o.Local] = c
}

// drain asks the job to go on without this host. The workers exit at the end of their step,
// or are asked to when the other hosts go on.
func (j *launcher) drain() {
	j.draining = true
	j.say("received SIGTERM: this host leaves the job at the end of the step; a second signal kills its ranks")
	for _, c := range j.children {
		c.stopped = c.running
	}
	_ = j.agent.Drain("received SIGTERM", exitSignalOffset+int(syscall.SIGTERM)) // if it fails, the agent's context ends
}

// restarting reports whether the coordinator has decided to start all workers again.
func (j *launcher) restarting() bool { return j.signal == 0 && j.agent.Restarting() }

// awaitRestart is called after the workers of this host have exited. It returns when
// the workers of all hosts can start again.
func (j *launcher) awaitRestart() error {
	j.pipes = nil // all are closed
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	next := make(chan error, 1)
	go func() { next <- j.agent.Next(ctx) }()
	for {
		select {
		case err := <-next:
			if err == nil {
				j.restarts++
			}
			return err
		case s := <-j.cfg.Signals:
			if j.signal != 0 {
				cancel() // the coordinator does not answer
			}
			j.signalled(s)
		}
	}
}

// notRestarted reports why the workers could not be started again, and returns the exit code.
func (j *launcher) notRestarted(err error) int {
	var stop *job.StopError
	switch {
	case j.signal != 0:
		j.say("received " + signalName(j.signal) + " during a restart")
		return exitSignalOffset + int(j.signal)
	case errors.As(err, &stop):
		j.say("the launcher on host " + stop.Host + " " + stop.Reason + " during a restart")
		return stop.ExitCode
	}
	j.fail("cannot start the ranks again: " + err.Error())
	return meetCode(err)
}

// quoteCause repeats the last lines of the worker that failed first.
func (j *launcher) quoteCause() {
	if lost, _ := j.causes(); lost != nil {
		if c := j.childOf(lost); c != nil {
			j.quote(c)
		}
	}
}
