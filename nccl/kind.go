package nccl

// A kind is what an operation does.
type kind uint8

const (
	allReduce kind = iota
	reduce
	broadcast
	allGather
	reduceScatter
	allToAll
	gather
	scatter
	send
	recv
	allGatherV
	reduceScatterV
	allToAllV
	numKinds
)

// A sizing is how long a buffer is, in parts of an operation's count.
type sizing uint8

const (
	none sizing = iota
	one         // the count
	all         // the count for each rank
)

// kinds has what the checks need to know of each kind.
var kinds = [numKinds]struct {
	name     string // NCCL's, or what NCCL would call it
	torch    string // in PyTorch's traces, behind "nccl:"
	reduces  bool
	rooted   bool
	peer     bool // the root is a peer
	dst, src sizing
	dstRoot  bool // only the root has a destination
	srcRoot  bool // only the root has a source
}{
	allReduce:     {name: "ncclAllReduce", torch: "all_reduce", reduces: true, dst: one, src: one},
	reduce:        {name: "ncclReduce", torch: "reduce", reduces: true, rooted: true, dst: one, src: one, dstRoot: true},
	broadcast:     {name: "ncclBroadcast", torch: "broadcast", rooted: true, dst: one, src: one, srcRoot: true},
	allGather:     {name: "ncclAllGather", torch: "_all_gather_base", dst: all, src: one},
	reduceScatter: {name: "ncclReduceScatter", torch: "_reduce_scatter_base", reduces: true, dst: one, src: all},
	allToAll:      {name: "ncclAlltoAll", torch: "all_to_all", dst: all, src: all},
	gather:        {name: "ncclGather", torch: "gather", rooted: true, dst: all, src: one, dstRoot: true},
	scatter:       {name: "ncclScatter", torch: "scatter", rooted: true, dst: one, src: all, srcRoot: true},
	send:          {name: "ncclSend", torch: "send", rooted: true, peer: true, src: one},
	recv:          {name: "ncclRecv", torch: "recv", rooted: true, peer: true, dst: one},

	allGatherV:     {name: "AllGatherV", torch: "ALLGATHER_coalesced", dst: all, src: one},
	reduceScatterV: {name: "ReduceScatterV", torch: "reduce_scatter_tensor_coalesced", reduces: true, dst: one, src: all},
	allToAllV:      {name: "AllToAllV", torch: "all_to_all", dst: all, src: all},
}

// String returns the name for messages, such as ncclAllReduce.
func (k kind) String() string { return kinds[k].name }
