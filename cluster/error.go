package cluster

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Errors that name no process.
var (
	// ErrClosed is returned by calls on a session or agent after its Close.
	ErrClosed = errors.New("cluster: session is closed")
	// ErrEnded is returned by store calls after the coordinator left without a
	// failure: rank 0 called Close where it holds the coordinator. Shutdown
	// avoids it.
	ErrEnded = errors.New("cluster: the coordinator has left, and the store with it")
	// ErrTooLarge is matched by a store call whose key or value exceeds
	// MaxKeyBytes or MaxValueBytes, and by one that waits for too many keys.
	ErrTooLarge = errors.New("too large")
	// ErrStoreFull is matched by a store call that would exceed MaxStoreBytes.
	ErrStoreFull = errors.New("the store is full")
	// ErrNotNumber is matched by an Add to a value that is no decimal number of
	// 64 bits, or whose sum is none.
	ErrNotNumber = errors.New("not a number of 64 bits")
	// ErrBusy is matched by a Barrier in which this rank waits already.
	ErrBusy = errors.New("this rank waits there already")
)

// A MemberLostError says which process was lost, since when and why. It is the
// cause of a session's context, and every call that waits ends with it.
type MemberLostError struct {
	Rank     int       // -1: the launcher of a host and all its ranks with it, or a process without a rank yet
	Host     string    // where it ran
	PID      int       // its process there; 0 when not known
	Since    time.Time // when the coordinator last heard from it, by this host's clock
	Reason   string    // such as "killed by SIGKILL"
	ExitCode int       // as a shell shows it, 128+n for signal n; -1 when not known
}

func (e *MemberLostError) Error() string {
	return fmt.Sprintf("cluster: %s lost: %s", e.Who(), e.Reason)
}

// LostRank returns Rank, for packages that do not import this one.
func (e *MemberLostError) LostRank() int { return e.Rank }

// Who names what was lost, as in "rank 2 (host b, pid 123)" or "host b (pid 99)".
func (e *MemberLostError) Who() string {
	if e.Rank < 0 {
		return fmt.Sprintf("host %s (pid %d)", e.Host, e.PID)
	}
	return fmt.Sprintf("rank %d (host %s, pid %d)", e.Rank, e.Host, e.PID)
}

// A StopError is the cause of an agent's context when a launcher was told to
// stop the whole job.
type StopError struct {
	Host     string // whose launcher was told
	Reason   string // such as "received SIGTERM"
	ExitCode int    // with which launchers should exit
}

func (e *StopError) Error() string {
	return fmt.Sprintf("cluster: job stopped: the launcher on host %s %s", e.Host, e.Reason)
}

// A JoinTimeoutError says who had not come when the time to join was over.
type JoinTimeoutError struct {
	Job     string
	Waited  time.Duration
	Addr    string   // the coordinator's, or the seeds that were tried
	Unit    string   // "process" or "host"
	Want    int      // how many make the job; 0 when the coordinator never answered
	Have    []Member // who came
	Missing []int    // ranks, or host numbers, that did not come; nil when not numbered
	Gone    []Member // those of Have that had given up by then
	Err     error    // the last failure to reach the coordinator, if any
}

func (e *JoinTimeoutError) Error() string {
	head := fmt.Sprintf("cluster: join job %q: ", e.Job)
	if e.Want == 0 {
		return fmt.Sprintf("%sno coordinator answered at %s for %v: %v; is rank 0, or the launcher on a seed host, running?",
			head, e.Addr, e.Waited.Round(time.Millisecond), e.Err)
	}
	return fmt.Sprintf("%sgave up after %v: %s", head, e.Waited.Round(time.Millisecond),
		roll{Unit: e.Unit, Want: e.Want, Have: e.Have, Missing: e.Missing, Gone: e.Gone})
}

func (e *JoinTimeoutError) fill(r roll) {
	e.Unit, e.Want, e.Have, e.Missing, e.Gone = r.Unit, r.Want, r.Have, r.Missing, r.Gone
}

func (e *JoinTimeoutError) Unwrap() error { return e.Err }

// Timeout reports true, as net.Error has it.
func (e *JoinTimeoutError) Timeout() bool { return true }

// An AuthError says that the process at the other end of a connection could not
// prove that it belongs to the job.
type AuthError struct {
	Job, Addr string
	Reason    string
	err       error // its cause, if not the two ends' secret, job or version
}

// Unwrap returns the cause, if it is an error by itself.
func (e *AuthError) Unwrap() error { return e.err }

func (e *AuthError) Error() string {
	if e.err != nil {
		return fmt.Sprintf("cluster: join job %q: coordinator at %s: %s", e.Job, e.Addr, e.Reason)
	}
	return fmt.Sprintf("cluster: join job %q: coordinator at %s: different secret or job: %s", e.Job, e.Addr, e.Reason)
}

// A DuplicateError says that two processes claim the same place in the job. It
// ends the join of all; of a job that is complete the second is refused.
type DuplicateError struct {
	Job           string
	Place         string // such as "rank 3"
	First, Second Member
}

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("cluster: join job %q: %s is taken: by host %s pid %d, and now claimed by host %s pid %d; start each once",
		e.Job, e.Place, e.First.Host, e.First.PID, e.Second.Host, e.Second.PID)
}

// A RefusedError is the coordinator's refusal of a process for any reason but a
// wrong secret and a duplicate.
type RefusedError struct {
	Job, Addr string
	Reason    string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("cluster: join job %q: refused by the coordinator at %s: %s", e.Job, e.Addr, e.Reason)
}

// A ConfigError is a mistake in what Start or Join was given.
type ConfigError struct{ Reason string }

func (e *ConfigError) Error() string { return "cluster: " + e.Reason }

func badConfig(format string, args ...any) error {
	return &ConfigError{fmt.Sprintf(format, args...)}
}

// An EnvironmentError says which environment variables cannot be used, alone or
// together, to find this process's place.
type EnvironmentError struct {
	Vars   []string // "NAME=value", or "NAME" when it is unset
	Reason string
}

func (e *EnvironmentError) Error() string {
	return fmt.Sprintf("cluster: environment: %s: %s", strings.Join(e.Vars, " and "), e.Reason)
}

// A StoreError says which store call failed. It matches ErrTooLarge and its
// kin, the context's error, or the *MemberLostError that ended the job.
type StoreError struct {
	Op   string // "get", "set", …
	Key  string
	Rank int // whose call
	Note string
	Err  error
}

func (e *StoreError) Error() string {
	note := ""
	if e.Note != "" {
		note = e.Note + ": "
	}
	return fmt.Sprintf("cluster: %s %q on rank %d: %s%v", e.Op, clip(e.Key), e.Rank, note, e.Err)
}

func (e *StoreError) Unwrap() error { return e.Err }

// A BarrierError says who kept a barrier from opening. Missing is nil when the
// coordinator could not be asked.
type BarrierError struct {
	Name    string
	Rank    int   // whose call
	Missing []int // ranks that had not come
	Left    []int // those of them that have left the job and never will
	Err     error // the context's error, or nil when a rank left
}

func (e *BarrierError) Error() string {
	head := fmt.Sprintf("cluster: barrier %q on rank %d: ", clip(e.Name), e.Rank)
	if len(e.Left) > 0 {
		return fmt.Sprintf("%s%s left the job without coming to it", head, rankList(e.Left))
	}
	if len(e.Missing) > 0 {
		return fmt.Sprintf("%s%s missing: %v", head, rankList(e.Missing), e.Err)
	}
	return fmt.Sprintf("%s%v", head, e.Err)
}

func (e *BarrierError) Unwrap() error { return e.Err }

// clip shortens a key for a message.
func clip(s string) string {
	if len(s) > 80 {
		return s[:77] + "..."
	}
	return s
}
