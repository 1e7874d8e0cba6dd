package launch

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/internal/job"
)

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
