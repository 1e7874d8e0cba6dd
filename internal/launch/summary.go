package launch

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// reportCause reports why the job failed, if it did, and returns code.
func (j *launcher) reportCause(code int) int {
	if code == 0 {
		return 0
	}
	lost, stop := j.causes()
	switch {
	case j.signal != 0:
		j.say(fmt.Sprintf("received %s%s", signalName(j.signal), j.stoppedAll()))
		return code
	case stop != nil:
		j.say(fmt.Sprintf("the launcher on host %s %s%s", stop.Host, stop.Reason, j.stoppedAll()))
		return code
	}
	if lost == nil {
		return code
	}
	then := ""
	if n := j.agent.Note(); n != nil { // a note always precedes the loss
		j.fail(fmt.Sprintf("%s %s, which ended the sessions of the others", n.Who(), n.Reason))
		then = "then "
	}
	switch c := j.childOf(lost); {
	case c != nil:
		j.log("ERROR", c, then+fmt.Sprintf("rank %d (host %s, pid %d) %s%s", c.rank, j.agent.Host(), c.pid, how(c, lost), j.endedWith(c)))
		j.quote(c)
	case lost.ExitCode >= 0 && strings.HasPrefix(lost.Reason, "its "):
		j.fail(then + fmt.Sprintf("%s failed: %s%s", lost.Who(), lost.Reason, j.endedWith(nil)))
	case lost.ExitCode >= 0:
		j.fail(then + fmt.Sprintf("%s %s%s", lost.Who(), lost.Reason, j.endedWith(nil)))
	case lost.Rank < 0 && lost.PID == os.Getpid() && lost.Host == j.agent.Host():
		was := "was lost: "
		if strings.HasPrefix(lost.Reason, "silent ") {
			was = "was "
		}
		j.fail(then + fmt.Sprintf("this launcher %s%s%s", was, lost.Reason, j.endedWith(nil)))
	default:
		j.fail(then + fmt.Sprintf("%s was lost: %s%s", lost.Who(), lost.Reason, j.endedWith(nil)))
	}
	if most := j.cfg.Cluster.MaxRestarts; most > 0 && j.usedRestarts() >= most {
		j.fail(fmt.Sprintf("the job is not started again: its restarts are used up (--max-restarts %d)", most))
	}
	return code
}

// usedRestarts returns how many restarts are known to have been used. If single workers are started again on several hosts,
// only the coordinator knows all of them.
func (j *launcher) usedRestarts() int {
	if j.agent.Nodes() > 1 {
		return j.restarts
	}
	return j.restarts + j.ordered
}

// how describes the loss of c. The coordinator's first observation counts, such
// as silence; a kill after that is only a consequence.
func how(c *child, lost *job.MemberLostError) string {
	after := fmt.Sprintf(" after %v", c.took.Round(roundTo(c.took)))
	if lost.ExitCode < 0 {
		text := "was lost" + after + ": " + lost.Reason
		if c.failedAlone(lost) {
			text += "; its process: " + c.why
		}
		return text
	}
	if strings.HasPrefix(lost.Reason, "its ") {
		return "failed" + after + ": " + lost.Reason
	}
	return lost.Reason + after
}

// roundTo returns the unit for rounding a duration to two or three digits.
func roundTo(d time.Duration) time.Duration {
	switch {
	case d < time.Second:
		return time.Millisecond
	case d < time.Minute:
		return 100 * time.Millisecond
	}
	return time.Second
}

// childOf returns this host's worker that was lost, or nil.
func (j *launcher) childOf(lost *job.MemberLostError) *child {
	for _, c := range j.children {
		if c.pid == lost.PID && lost.Rank >= 0 && lost.Host == j.agent.Host() {
			return c
		}
	}
	return nil
}

// stoppedAll reports how many workers were stopped.
func (j *launcher) stoppedAll() string {
	if who := j.others(nil); who != "" {
		return "; stopped " + who
	}
	return ""
}

// endedWith reports how many workers besides first were stopped, or failed as a
// consequence of the first loss.
func (j *launcher) endedWith(first *child) string {
	if who := j.others(first); who != "" {
		return "; " + who + " ended with it"
	}
	return ""
}

// others describes the workers except but that failed or were stopped, or
// returns "" if there are none.
func (j *launcher) others(but *child) string {
	n := 0
	for _, c := range j.children {
		if c != but && (c.stopped || c.code() != 0) {
			n++
		}
	}
	which, where := "", ""
	if but != nil {
		which = "other "
	}
	if j.agent.Nodes() > 1 {
		where = " of this host"
	}
	switch {
	case n == 0:
		return ""
	case n == 1 && which == "":
		return "1 rank" + where
	case n == 1:
		return fmt.Sprintf("the %srank%s", which, where)
	}
	return fmt.Sprintf("the %s%d ranks%s", which, n, where)
}

// quote repeats the last lines of a worker's stderr if other output followed them.
func (j *launcher) quote(c *child) {
	lines := j.out.buried(c)
	if len(lines) == 0 {
		return
	}
	j.log("ERROR", c, fmt.Sprintf("the last lines of rank %d's stderr were:\n    %s", c.rank, strings.Join(lines, "\n    ")))
}
