package nccl

import (
	"strings"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// kinds has the kind of each function that a ncclapi.Call can have.
var kinds = [ncclapi.NumFuncs]kind{
	ncclapi.FuncAllReduce: kindAllReduce, ncclapi.FuncBroadcast: kindBroadcast, ncclapi.FuncReduce: kindReduce,
	ncclapi.FuncAllGather: kindAllGather, ncclapi.FuncReduceScatter: kindReduceScatter, ncclapi.FuncAlltoAll: kindAlltoAll,
	ncclapi.FuncGather: kindGather, ncclapi.FuncScatter: kindScatter, ncclapi.FuncSend: kindSend, ncclapi.FuncRecv: kindRecv,
}

func (l *lib) Collective(c ncclapi.Call) ncclapi.Result {
	d := &ncclapi.Collectives[c.Func]
	i := issue{
		f: c.Called(), kind: kinds[c.Func], count: c.Count, t: c.Type, comm: c.Comm, stream: c.Stream, cfg: c.Config,
		perRankSend: d.Sends == ncclapi.EachRank, perRankRecv: d.Recvs == ncclapi.EachRank, sendAtRoot: d.SendRoot, recvAtRoot: d.RecvRoot,
	}
	if d.Sends != ncclapi.None {
		i.send, i.sends = c.Send, 1
	}
	if d.Recvs != ncclapi.None {
		i.recv, i.recvs = c.Recv, 1
	}
	if strings.Contains(d.Arguments, "o") {
		i.op = c.Op
	}
	if strings.Contains(d.Arguments, "p") {
		i.root = c.Root
	}
	return i.submit(l)
}
