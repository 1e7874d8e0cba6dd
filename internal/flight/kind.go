package flight

import "strings"

// A Kind is the kind of an operation.
type Kind uint8

const (
	AllReduce Kind = iota + 1 // 0 is invalid
	Reduce
	Broadcast
	AllGather
	ReduceScatter
	AllToAll
	Gather
	Scatter
	Send
	Recv
	AllGatherV
	ReduceScatterV
	AllToAllV
	NumKinds // the number of kinds plus one
)

// A Sizing is the length of a buffer relative to an operation's count.
type Sizing uint8

const (
	None Sizing = iota
	One         // the count
	All         // the count for each rank
)

// Kinds describes each Kind.
var Kinds = [NumKinds]struct {
	Name     string // NCCL's name, or a similar name if NCCL has none
	Plain    string // the name that users read, such as "all-reduce"
	Torch    string // name in PyTorch's traces, after "nccl:"
	Reduces  bool
	Rooted   bool
	Peer     bool // the root is a peer
	Dst, Src Sizing
	DstRoot  bool // only the root has a destination
	SrcRoot  bool // only the root has a source
}{
	AllReduce:     {Name: "ncclAllReduce", Plain: "all-reduce", Torch: "all_reduce", Reduces: true, Dst: One, Src: One},
	Reduce:        {Name: "ncclReduce", Plain: "reduce", Torch: "reduce", Reduces: true, Rooted: true, Dst: One, Src: One, DstRoot: true},
	Broadcast:     {Name: "ncclBroadcast", Plain: "broadcast", Torch: "broadcast", Rooted: true, Dst: One, Src: One, SrcRoot: true},
	AllGather:     {Name: "ncclAllGather", Plain: "all-gather", Torch: "_all_gather_base", Dst: All, Src: One},
	ReduceScatter: {Name: "ncclReduceScatter", Plain: "reduce-scatter", Torch: "_reduce_scatter_base", Reduces: true, Dst: One, Src: All},
	AllToAll:      {Name: "ncclAlltoAll", Plain: "all-to-all", Torch: "all_to_all", Dst: All, Src: All},
	Gather:        {Name: "ncclGather", Plain: "gather", Torch: "gather", Rooted: true, Dst: All, Src: One, DstRoot: true},
	Scatter:       {Name: "ncclScatter", Plain: "scatter", Torch: "scatter", Rooted: true, Dst: One, Src: All, SrcRoot: true},
	Send:          {Name: "ncclSend", Plain: "send", Torch: "send", Rooted: true, Peer: true, Src: One},
	Recv:          {Name: "ncclRecv", Plain: "receive", Torch: "recv", Rooted: true, Peer: true, Dst: One},

	AllGatherV:     {Name: "AllGatherV", Plain: "all-gather-v", Torch: "ALLGATHER_coalesced", Dst: All, Src: One},
	ReduceScatterV: {Name: "ReduceScatterV", Plain: "reduce-scatter-v", Torch: "reduce_scatter_tensor_coalesced", Reduces: true, Dst: One, Src: All},
	AllToAllV:      {Name: "AllToAllV", Plain: "all-to-all-v", Torch: "all_to_all", Dst: All, Src: All},
}

// String returns the name for messages, such as ncclAllReduce.
func (k Kind) String() string { return Kinds[k].Name }

// Label returns the name in metrics, such as "all_reduce".
func (k Kind) Label() string { return strings.ReplaceAll(k.Plain(), "-", "_") }

// Plain returns the name that users read, such as "all-reduce".
func (k Kind) Plain() string { return Kinds[k].Plain }
