package flight

import (
	"os"
	"slices"
	"time"
)

// A source says where a dump comes from. It is a separate object, which PyTorch's
// tools ignore.
//
// The state of an entry is what the host has observed: "scheduled", "started" or "completed". The recorder
// does not record two events for each operation, so an operation that is "scheduled" may have started.
// With "queued" it has not: its stream had not reached it when the host observed the stream. Entries with the same
// batch were issued together. An operation whose record is above Accepted is in a call of NCCL that
// has not returned.
type source struct {
	Format int           `json:"format"` // 1
	Host   string        `json:"host"`
	PID    int           `json:"pid"`
	Clock  clockPair     `json:"clock"` // when the dump was written
	Origin clockPair     `json:"clock_origin"`
	Groups []sourceGroup `json:"groups"`
}

// A clockPair is one moment by two clocks. Times of entries are Origin's wall clock plus the
// elapsed time of the monotonic clock, which all processes of a host share.
type clockPair struct {
	Wall      int64 `json:"wall_ns"`
	Monotonic int64 `json:"monotonic_ns"`
}

// A sourceGroup describes the rank of a recorder.
type sourceGroup struct {
	Group      int64  `json:"pg_id"`
	Rank       int    `json:"rank"`
	WorldRank  *int   `json:"world_rank"`  // null if not known
	WorldRanks []int  `json:"world_ranks"` // by rank; null if not known
	WorldSize  int    `json:"world_size"`  // 0 if not known
	Device     string `json:"device"`
	UUID       string `json:"uuid"`
	Capacity   int    `json:"capacity"`              // operations that the ring holds; 0 if the trace is off
	Issued     uint64 `json:"issued"`                // record of the last operation
	Accepted   uint64 `json:"accepted"`              // record of the last operation that NCCL has accepted
	End        string `json:"end,omitempty"`         // how it ended on this rank, as noticed first
	EndFollows bool   `json:"end_follows,omitempty"` // the cause may be another rank
	Shortened  bool   `json:"shortened,omitempty"`   // the dump does not have all operations of the ring
}

func newSource() source {
	host, _ := os.Hostname() // "" if it is not known
	now := clockPair{Wall: time.Now().UnixNano(), Monotonic: nanotime()}
	return source{
		Format: 1, Host: host, PID: os.Getpid(), Clock: now,
		Origin: clockPair{Wall: origin.UnixNano(), Monotonic: originNanos}, Groups: []sourceGroup{},
	}
}

func (s *source) add(r *Recorder, shortened bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := sourceGroup{
		Group: r.Number, Rank: r.Rank, WorldRanks: slices.Clone(r.world), WorldSize: r.worldSize, Device: r.Device, UUID: r.UUID,
		Capacity: len(r.ring), Issued: r.last, Accepted: r.enqueued, Shortened: shortened, End: r.end, EndFollows: r.endFollows,
	}
	if r.hidden {
		g.Capacity = 0
	}
	if r.Rank < len(r.world) {
		g.WorldRank = &g.WorldRanks[r.Rank]
	}
	s.Groups = append(s.Groups, g)
}
