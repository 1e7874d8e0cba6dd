package nccl

import (
	"runtime"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/stream"
)

// native gives the operation to NCCL. The communicator is entered.
func (o *operation) native() error {
	if o.captured || stream.AnyCapture() {
		return relaxed(o.comm.dev, o.ask)
	}
	if r := o.enqueue(); r != ncclapi.Success {
		return o.comm.fail(o.kind.String(), r)
	}
	return nil
}

// ask is enqueue with an error for what is not a success.
func (o *operation) ask() error { return o.comm.fail(o.kind.String(), o.enqueue()) }

// enqueue calls NCCL.
func (o *operation) enqueue() ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, o.stream.Raw()
	n, root := uintptr(o.n*o.unit), int32(o.root)
	switch o.kind {
	case allReduce:
		return api.AllReduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case reduce:
		return api.Reduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, root, h, s)
	case broadcast:
		from := o.src.ptr
		if o.comm.rank != o.root {
			from = o.dst.ptr
		}
		return api.Broadcast(from, o.dst.ptr, n, o.wire, root, h, s)
	case allGather:
		return api.AllGather(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
	case reduceScatter:
		return api.ReduceScatter(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case send:
		return api.Send(o.src.ptr, n, o.wire, root, h, s)
	case recv:
		return api.Recv(o.dst.ptr, n, o.wire, root, h, s)
	}
	if api.Has(ncclapi.FuncAlltoAll) { // and the other two, which came with it
		switch o.kind {
		case allToAll:
			return api.AlltoAll(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
		case gather:
			return api.Gather(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		case scatter:
			return api.Scatter(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		}
	}
	return o.grouped()
}

// grouped makes one operation of several that NCCL has. When one of them is
// refused NCCL drops them all.
func (o *operation) grouped() ncclapi.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	api := o.comm.api
	if r := api.GroupStart(); r != ncclapi.Success {
		return r
	}
	first := o.members()
	if r := api.GroupEnd(); first == ncclapi.Success {
		return r
	}
	return first
}

// members issues what a grouped operation is made of, rank by rank. Parts
// without elements are left out: the other side knows that they are empty.
func (o *operation) members() ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, o.stream.Raw()
	me, root := o.comm.rank, o.root
	var sent, received int // elements before the part
	for rank := range o.comm.size {
		out, in := o.counts(rank)
		from, to := o.at(o.src, sent), o.at(o.dst, received)
		sent, received = sent+out, received+in
		n, m := uintptr(out*o.unit), uintptr(in*o.unit)
		r := ncclapi.Success
		switch o.kind {
		case allGatherV: // rank broadcasts its part
			if rank == me {
				from = o.src.ptr
			} else {
				from = to
			}
			if m > 0 {
				r = api.Broadcast(from, to, m, o.wire, int32(rank), h, s)
			}
		case reduceScatterV: // rank gets its part
			to = 0
			if rank == me {
				to = o.dst.ptr
			}
			if n > 0 {
				r = api.Reduce(from, to, n, o.wire, o.redop, int32(rank), h, s)
			}
		case gather:
			if rank == root && n > 0 {
				r = api.Send(o.src.ptr, n, o.wire, int32(root), h, s)
			}
			if me == root && m > 0 && r == ncclapi.Success {
				r = api.Recv(to, m, o.wire, int32(rank), h, s)
			}
		case scatter:
			if me == root && n > 0 {
				r = api.Send(from, n, o.wire, int32(rank), h, s)
			}
			if rank == root && m > 0 && r == ncclapi.Success {
				r = api.Recv(o.dst.ptr, m, o.wire, int32(root), h, s)
			}
		default:
			if n > 0 {
				r = api.Send(from, n, o.wire, int32(rank), h, s)
			}
			if m > 0 && r == ncclapi.Success {
				r = api.Recv(to, m, o.wire, int32(rank), h, s)
			}
		}
		if r != ncclapi.Success {
			return r
		}
	}
	return ncclapi.Success
}

// counts are the elements that go to a rank and come from it.
func (o *operation) counts(rank int) (out, in int) {
	if o.sends == nil {
		return o.n, o.n
	}
	return o.sends[rank], o.recvs[rank]
}

// at is the address of an element.
func (o *operation) at(x operand, element int) cudadrv.DevicePtr {
	return x.ptr + cudadrv.DevicePtr(element*o.dtype.Size())
}
