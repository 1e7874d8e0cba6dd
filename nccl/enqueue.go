package nccl

import (
	"github.com/gochorus/chorus/internal/flight"
	"runtime"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// execute gives the operation to NCCL. The communicator is locked.
func (o *operation) execute() error {
	if o.Captured || gpu.AnyCapture() {
		return relaxed(o.comm.dev, o.checkedCall)
	}
	if r := o.callNCCL(); r != ncclapi.Success {
		return o.comm.check(o.Kind.String(), r)
	}
	return nil
}

// checkedCall is callNCCL with an error if it does not succeed.
func (o *operation) checkedCall() error { return o.comm.check(o.Kind.String(), o.callNCCL()) }

// callNCCL calls NCCL's function.
func (o *operation) callNCCL() ncclapi.Result {
	if o.config != nil {
		return o.callConfigured()
	}
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	n, root := uintptr(o.N*o.unit), int32(o.Root)
	switch o.Kind {
	case flight.AllReduce:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.AllReduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case flight.Reduce:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.Reduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, root, h, s)
	case flight.Broadcast:
		from := o.src.ptr
		if o.comm.rank != o.Root {
			from = o.dst.ptr
		}
		return api.Broadcast(from, o.dst.ptr, n, o.wire, root, h, s)
	case flight.AllGather:
		return api.AllGather(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
	case flight.ReduceScatter:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.ReduceScatter(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case flight.Send:
		return api.Send(o.src.ptr, n, o.wire, root, h, s)
	case flight.Recv:
		return api.Recv(o.dst.ptr, n, o.wire, root, h, s)
	}
	if api.Has(ncclapi.FuncAlltoAll) { // and the other two functions, which are in the same release
		switch o.Kind {
		case flight.AllToAll:
			return api.AlltoAll(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
		case flight.Gather:
			return api.Gather(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		case flight.Scatter:
			return api.Scatter(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		}
	}
	return o.callGrouped()
}

// callOneRank calls NCCL for a reduction of a single rank.
func (o *operation) callOneRank() ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	return o.inOneRankParts(o.src.ptr, o.dst.ptr, uintptr(o.N*o.unit), func(from, to cudadrv.DevicePtr, n uintptr) ncclapi.Result {
		switch o.Kind {
		case flight.Reduce:
			return api.Reduce(from, to, n, o.wire, o.redop, 0, h, s)
		case flight.ReduceScatter:
			return api.ReduceScatter(from, to, n, o.wire, o.redop, h, s)
		}
		return api.AllReduce(from, to, n, o.wire, o.redop, h, s)
	})
}

// callGrouped implements an operation by several operations of NCCL. If NCCL refuses one of
// them, it drops them all.
func (o *operation) callGrouped() ncclapi.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	api := o.comm.api
	if r := api.GroupStart(); r != ncclapi.Success {
		return r
	}
	first := o.callParts()
	if r := api.GroupEnd(); first == ncclapi.Success {
		return r
	}
	return first
}

// callParts issues the parts of a grouped operation, rank by rank.
func (o *operation) callParts() ncclapi.Result {
	var sent, received int // elements before the part
	for rank := range o.comm.size {
		out, in := o.counts(rank)
		p := part{rank: int32(rank), from: o.at(o.src, sent), to: o.at(o.dst, received), out: uintptr(out * o.unit), in: uintptr(in * o.unit)}
		if r := o.callPart(&p); r != ncclapi.Success {
			return r
		}
		sent, received = sent+out, received+in
	}
	return ncclapi.Success
}

// A part is the data that a rank exchanges with one rank in a grouped operation.
type part struct {
	rank     int32
	from, to cudadrv.DevicePtr
	out, in  uintptr // the number of elements at from and to, as NCCL counts them
}

// callPart issues one part.
func (o *operation) callPart(p *part) ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	me := int(p.rank) == o.comm.rank
	switch o.Kind {
	case flight.AllGatherV: // the rank broadcasts its part
		if p.from = p.to; me {
			p.from = o.src.ptr
		}
		if p.in == 0 {
			return ncclapi.Success
		}
		return api.Broadcast(p.from, p.to, p.in, o.wire, p.rank, h, s)
	case flight.ReduceScatterV: // the rank gets its part
		if p.to = 0; me {
			p.to = o.dst.ptr
		}
		if p.out == 0 {
			return ncclapi.Success
		}
		return o.inOneRankParts(p.from, p.to, p.out, func(from, to cudadrv.DevicePtr, n uintptr) ncclapi.Result {
			return api.Reduce(from, to, n, o.wire, o.redop, p.rank, h, s)
		})
	case flight.Gather:
		p.from = o.src.ptr
		return o.sendRecv(p, int(p.rank) == o.Root, o.comm.rank == o.Root)
	case flight.Scatter:
		p.to = o.dst.ptr
		return o.sendRecv(p, o.comm.rank == o.Root, int(p.rank) == o.Root)
	}
	return o.sendRecv(p, true, true)
}

// sendRecv sends a part to its rank and receives one from it. It omits empty parts: the other
// rank also knows that they are empty.
func (o *operation) sendRecv(p *part, sends, receives bool) ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	if sends && p.out > 0 {
		if r := api.Send(p.from, p.out, o.wire, p.rank, h, s); r != ncclapi.Success {
			return r
		}
	}
	if receives && p.in > 0 {
		return api.Recv(p.to, p.in, o.wire, p.rank, h, s)
	}
	return ncclapi.Success
}

// counts returns the number of elements to send to a rank and to receive from it.
func (o *operation) counts(rank int) (out, in int) {
	if o.sends == nil {
		return o.N, o.N
	}
	return o.sends[rank], o.recvs[rank]
}

// at returns the address of an element.
func (o *operation) at(x operand, element int) cudadrv.DevicePtr {
	return x.ptr + cudadrv.DevicePtr(element*o.DType.Size())
}
