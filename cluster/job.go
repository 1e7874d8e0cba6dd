package cluster

import (
	"github.com/gochorus/chorus/internal/job"
)

// Errors that do not name a process.
var (
	// ErrClosed is returned by calls on a session after its Close.
	ErrClosed = job.ErrClosed
	// ErrEnded is returned by store calls after the coordinator closed without
	// a failure: rank 0 called Close, and its process ran the coordinator. Use
	// Shutdown to avoid this.
	ErrEnded = job.ErrEnded
	// ErrTooLarge matches a store call whose key or value is larger than Store allows, or that waits for too many keys.
	ErrTooLarge = job.ErrTooLarge
)

// Timing holds the time limits of a job. A zero field means the value of the
// environment variable or, if that is unset, the default.
//
//	Join      time.Duration // for all members to join; CHORUS_JOIN_TIMEOUT, 5 minutes
//	Call      time.Duration // for a store call whose context has no deadline; CHORUS_CALL_TIMEOUT, 5 minutes
//	Heartbeat time.Duration // interval of heartbeats; CHORUS_HEARTBEAT, 500 ms
//	LostAfter time.Duration // silence after which a process is lost; CHORUS_LOST_AFTER, 3 s
//	Revoke    time.Duration // for the function of Run to return after the end of its epoch; CHORUS_REVOKE_TIMEOUT, 15 s
//	Drain     time.Duration // for a planned change to wait for the end of a step; CHORUS_DRAIN_TIMEOUT, 30 s
//	Backoff   time.Duration // before the second of several restarts; CHORUS_BACKOFF, 1 s
type Timing = job.Timing

// A Member is one process of the world.
//
//	Rank      int
//	LocalRank int
//	LocalSize int
//	Node      int    // index of its host
//	Host      string
//	PID       int
//	Name      string // breaks ties if the coordinator assigns ranks
type Member = job.Member

// A Departure is a process that is not in the world any more.
//
//	Member         // in the last epoch with it
//	Reason  string // such as "killed by SIGKILL"
//	Planned bool   // its host was drained
type Departure = job.Departure

// A MemberLostError names a lost process, the time and the reason. It is the
// cause of a session's context, and all waiting calls return it. Who describes the process.
//
//	Rank     int       // -1: the launcher of a host, with all its ranks, or a process without a rank
//	Host     string    // host of the process
//	PID      int       // 0 if unknown
//	Since    time.Time // last message to the coordinator, by this host's clock
//	Reason   string    // such as "killed by SIGKILL"
//	ExitCode int       // as in a shell, 128+n for signal n; -1 if unknown
//	Closed   bool      // its connection was closed, as by the end of its process
type MemberLostError = job.MemberLostError

// A StopError is the cause of a session's context after a launcher was asked to
// stop the whole job.
//
//	Host     string // host of that launcher
//	Reason   string // such as "received SIGTERM"
//	ExitCode int    // exit code for all launchers
type StopError = job.StopError

// A JoinTimeoutError lists the members that had not joined in time. Its Timeout method returns true, as in net.Error.
//
//	Job     string
//	Waited  time.Duration
//	Addr    string   // address of the coordinator, or the seeds that were tried
//	Unit    string   // "process" or "host"
//	Want    int      // members of the job; 0 if the coordinator never answered
//	Have    []Member // members that joined
//	Missing []int    // missing ranks, or host indices, the first 65536 of them; nil if members have no numbers
//	Gone    []Member // members of Have that timed out earlier
//	Err     error    // the last failure to reach the coordinator, if any
type JoinTimeoutError = job.JoinTimeoutError

// An AuthError reports that the process at the other end of a connection could
// not prove that it belongs to the job.
//
//	Job, Addr string
//	Reason    string
type AuthError = job.AuthError

// A DuplicateError reports that two processes claim the same place in the job.
// The join then fails on all members. In a complete job only the second process
// is refused.
//
//	Job           string
//	Place         string // such as "rank 3"
//	First, Second Member
type DuplicateError = job.DuplicateError

// A RefusedError reports that the coordinator refused a process for a reason
// other than a wrong secret or a duplicate.
//
//	Job, Addr string
//	Reason    string
type RefusedError = job.RefusedError

// A ConfigError is a mistake in the arguments of Join or Run, or in environment
// variables, so that this process's place is unknown.
//
//	Vars   []string // environment variables: "NAME=value", or "NAME" if unset
//	Reason string
type ConfigError = job.ConfigError
