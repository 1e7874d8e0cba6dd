package job

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Errors that do not name a process.
var (
	// ErrClosed is returned by calls on a session or agent after its Close.
	ErrClosed = errors.New("cluster: session is closed")
	// ErrEnded is returned by store calls after the coordinator closed without
	// a failure: rank 0 called Close, and its process ran the coordinator. Use
	// Shutdown to avoid this.
	ErrEnded = errors.New("cluster: the coordinator has left, and the store with it")
	// ErrTooLarge matches a store call whose key or value exceeds MaxKeyBytes or
	// MaxValueBytes, or that waits for too many keys.
	ErrTooLarge = errors.New("too large")
)

// A MemberLostError names a lost process, the time and the reason. It is the
// cause of a session's context, and all waiting calls return it.
type MemberLostError struct {
	Rank     int       // -1: the launcher of a host, with all its ranks, or a process without a rank
	Host     string    // host of the process
	PID      int       // 0 if unknown
	Since    time.Time // last message to the coordinator, by this host's clock
	Reason   string    // such as "killed by SIGKILL"
	ExitCode int       // as in a shell, 128+n for signal n; -1 if unknown
	Closed   bool      // its connection was closed, as by the end of its process
}

func (e *MemberLostError) Error() string {
	return fmt.Sprintf("cluster: %s lost: %s", e.Who(), e.Reason)
}

// LostRank returns Rank for packages that do not import cluster.
func (e *MemberLostError) LostRank() int { return e.Rank }

// Who describes the lost process, such as "rank 2 (host b, pid 123)" or "host b (pid 99)".
func (e *MemberLostError) Who() string {
	switch {
	case e.Rank < 0:
		return fmt.Sprintf("host %s (pid %d)", e.Host, e.PID)
	case e.PID == 0:
		return fmt.Sprintf("rank %d (host %s)", e.Rank, e.Host)
	}
	return fmt.Sprintf("rank %d (host %s, pid %d)", e.Rank, e.Host, e.PID)
}

// A Departure is a process that is not in the world any more.
type Departure struct {
	Member         // in the last epoch with it
	Reason  string `json:"reason"`            // such as "killed by SIGKILL"
	Planned bool   `json:"planned,omitempty"` // its host was drained
}

// A StopError is the cause of an agent's context after a launcher was asked to
// stop the whole job.
type StopError struct {
	Host     string // host of that launcher
	Reason   string // such as "received SIGTERM"
	ExitCode int    // exit code for all launchers
}

func (e *StopError) Error() string {
	return fmt.Sprintf("cluster: job stopped: the launcher on host %s %s", e.Host, e.Reason)
}

// A JoinTimeoutError lists the members that had not joined in time.
type JoinTimeoutError struct {
	Job     string
	Waited  time.Duration
	Addr    string   // address of the coordinator, or the seeds that were tried
	Unit    string   // "process" or "host"; "member" if a registry does not answer
	Want    int      // members of the job; 0 if the coordinator never answered
	Have    []Member // members that joined
	Missing []int    // missing ranks, or host indices, the first 65536 of them; nil if members have no numbers
	Gone    []Member // members of Have that timed out earlier
	Refused []string // who came with other settings and was refused, each with the reason
	Peers   []string // addresses by rank, if JoinConfig.Peers has them
	Err     error    // the last failure to reach the coordinator, if any
}

func (e *JoinTimeoutError) Error() string {
	head := fmt.Sprintf("cluster: join job %q: ", e.Job)
	if e.Want == 0 {
		hint := "is rank 0, or the launcher on a seed host, running?"
		if e.Unit == UnitMember {
			hint = "is the process with the registry running, with the same secret, or also without one?"
		}
		return fmt.Sprintf("%sno coordinator answered at %s for %v: %v; %s", head, e.Addr, e.Waited.Round(time.Millisecond), e.Err, hint)
	}
	text := fmt.Sprintf("%stimed out after %v: %s", head, e.Waited.Round(time.Millisecond),
		e.attendance())
	if len(e.Peers) == e.Want && len(e.Missing) > 0 {
		var list []string
		for _, rank := range e.Missing[:min(len(e.Missing), maxNamed)] {
			if rank >= 0 && rank < len(e.Peers) {
				list = append(list, e.Peers[rank])
			}
		}
		text += fmt.Sprintf("; these peers did not come: %s%s", strings.Join(list, ", "), andMore(len(e.Missing)))
	}
	if refused, ok := errors.AsType[*AuthError](e.Err); ok {
		text += fmt.Sprintf("; a process at %s refused this host: %s", refused.Addr, refused.Reason)
	}
	return text
}

// Fill adds who has joined to an error.
func (r attendance) Fill(e *JoinTimeoutError) {
	e.Unit, e.Want, e.Have, e.Missing, e.Gone, e.Refused = r.Unit, r.Want, r.Have, r.Missing, r.Gone, r.Refused
}

func (e *JoinTimeoutError) attendance() attendance {
	return attendance{Unit: e.Unit, Want: e.Want, Have: e.Have, Missing: e.Missing, Gone: e.Gone, Refused: e.Refused}
}

func (e *JoinTimeoutError) Unwrap() error { return e.Err }

// Timeout returns true, as in net.Error.
func (e *JoinTimeoutError) Timeout() bool { return true }

// An AuthError reports that the process at the other end of a connection could
// not prove that it belongs to the job.
type AuthError struct {
	Job, Addr string
	Reason    string
	err       error // the cause, unless secrets, jobs or versions differ
}

// Unwrap returns the cause, or nil.
func (e *AuthError) Unwrap() error { return e.err }

func (e *AuthError) Error() string {
	return fmt.Sprintf("cluster: join job %q: coordinator at %s: %s", e.Job, e.Addr, e.Reason)
}

// A DuplicateError reports that two processes claim the same place in the job.
// The join then fails on all members. In a complete job only the second process
// is refused.
type DuplicateError struct {
	Job           string
	Place         string // such as "rank 3"
	First, Second Member
}

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("cluster: join job %q: %s is taken: by host %s pid %d, and now claimed by host %s pid %d; start each once",
		e.Job, e.Place, e.First.Host, e.First.PID, e.Second.Host, e.Second.PID)
}

// A RefusedError reports that the coordinator refused a process for a reason
// other than a wrong secret or a duplicate.
type RefusedError struct {
	Job, Addr string
	Reason    string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("cluster: join job %q: refused by the coordinator at %s: %s", e.Job, e.Addr, e.Reason)
}

// A ConfigError is a mistake in the arguments of Start or Join, or in environment
// variables, so that this process's place is unknown.
type ConfigError struct {
	Vars   []string // environment variables: "NAME=value", or "NAME" if unset
	Reason string
}

func (e *ConfigError) Error() string {
	if len(e.Vars) > 0 {
		return fmt.Sprintf("cluster: environment: %s: %s", strings.Join(e.Vars, " and "), e.Reason)
	}
	return "cluster: " + e.Reason
}

func BadConfig(format string, args ...any) error {
	return &ConfigError{Reason: fmt.Sprintf(format, args...)}
}

// Err converts the fault to an error for the user of this process.
func (f Fault) Err() error {
	if f.Stop {
		return &StopError{Host: f.Host, Reason: f.Reason, ExitCode: f.Code}
	}
	return &MemberLostError{Rank: f.Rank, Host: f.Host, PID: f.PID,
		Since: time.Now().Add(-f.Silent), Reason: f.Reason, ExitCode: f.Code, Closed: f.Closed}
}

// Err converts the refusal to an error for the user of this process.
func (r Refusal) Err(job, addr string) error {
	if r.Finished {
		return ErrFinished
	}
	if r.Attendance != nil {
		e := &JoinTimeoutError{Job: job, Waited: r.Waited, Addr: addr}
		r.Attendance.Fill(e)
		return e
	}
	if r.First != nil && r.Second != nil {
		return &DuplicateError{Job: job, Place: r.Place, First: *r.First, Second: *r.Second}
	}
	return &RefusedError{Job: job, Addr: addr, Reason: r.Reason}
}
