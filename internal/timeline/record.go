package timeline

// Kinds of records.
const (
	Kernel     = "kernel"
	Copy       = "copy"
	Fill       = "fill"
	Collective = "collective" // a collective, a send or a receive, or several in one batch
	Graph      = "graph"      // a launch of a graph
	Callback   = "callback"   // a function of the host, in the order of a stream
	Wait       = "wait"       // the host waits for a device
	Driver     = "driver"     // the host is in a call that allocates or frees memory
	Range      = "range"      // of nvtx
	Instant    = "instant"    // a mark of nvtx
	Memory     = "memory"     // an event of the allocator
	Member     = "member"     // a rank of a communicator
	Dropped    = "dropped"    // how many records are missing
)

// NoDevice is the device of a record of the host.
const NoDevice = -1

// A Header is the first line of a file.
type Header struct {
	Format    int    `json:"timeline"` // 1
	Host      string `json:"host"`
	Boot      string `json:"boot_id"` // processes with the same one share a monotonic clock
	PID       int    `json:"pid"`
	Rank      *int   `json:"rank,omitempty"` // null if the environment does not tell it
	WorldSize int    `json:"world_size,omitempty"`
	Wall      int64  `json:"origin_wall_ns"`
	Monotonic int64  `json:"origin_monotonic_ns"`
}

// A Record is a line after the header.
type Record struct {
	Kind   string `json:"kind"`
	Name   string `json:"name,omitempty"`
	Begin  int64  `json:"begin_ns"`
	End    int64  `json:"end_ns,omitempty"`
	Device int    `json:"device"` // ordinal, or NoDevice
	Stream uint64 `json:"stream,omitempty"`
	Lane   bool   `json:"lane,omitempty"`   // a branch of a graph that was captured on the stream
	Order  uint64 `json:"order,omitempty"`  // of the call that enqueued it, among all of the process
	Parent uint64 `json:"parent,omitempty"` // order of the collective that it is a part of
	Bytes  uint64 `json:"bytes,omitempty"`
	Count  uint64 `json:"count,omitempty"` // of a Dropped record
	Ops    []Op   `json:"operations,omitempty"`

	Member *Membership `json:"member,omitempty"`
}

// An Op is an operation of a collective record.
type Op struct {
	Group    string `json:"group"` // the same on all ranks of the communicator
	Name     string `json:"name"`  // such as ncclAllReduce
	Sequence uint64 `json:"sequence"`
	Transfer bool   `json:"transfer,omitempty"` // a send or a receive
	Bytes    uint64 `json:"bytes"`
	Rank     int    `json:"rank"` // in the group
	Peer     int    `json:"peer"` // or the root; -1 means none
}

// A Membership describes a rank of a communicator.
type Membership struct {
	Group     string `json:"group"`
	Label     string `json:"label,omitempty"` // the name that the program gave
	Rank      int    `json:"rank"`
	Size      int    `json:"size"`
	World     []int  `json:"world_ranks,omitempty"` // by rank
	WorldSize int    `json:"world_size,omitempty"`
}

// A Stream names a stream of a process.
type Stream struct {
	Device int
	Handle uint64
	Lane   bool
}
