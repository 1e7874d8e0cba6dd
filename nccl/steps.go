package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/ranks"
)

// batchRef is how internal/route reaches the steps of a batch.
type batchRef = ranks.BatchRef

// steps are the steps of Enqueue as internal/route sees them. Package ranks documents them.
type steps struct{ b *Batch }

func (x steps) Prepare() error {
	if x.b.refused != nil {
		return x.b.refused
	}
	return x.b.group.prepare()
}

func (x steps) Len() int { return len(x.b.group.ops) }

func (x steps) At(i int) ranks.Operation {
	o := &x.b.group.ops[i]
	return ranks.Operation{Op: &o.Op, Comm: inside{o.comm}, Rank: o.comm.rank, Dst: uint64(o.dst.ptr), Src: uint64(o.src.ptr), Counts: o.sends}
}

func (x steps) Record() error { return x.b.group.record() }

func (x steps) Execute(i int) error { return x.b.group.ops[i].execute() }

func (x steps) StartGroup() error { return x.b.group.startGroup() }

func (x steps) EndGroup() error { return x.b.group.endGroup(ncclapi.API.GroupEnd) }

func (x steps) Move(list []ranks.Move) error { return x.b.group.move(list) }

func (x steps) Substitute(i int, dst, src uint64) {
	o := &x.b.group.ops[i]
	o.dst.ptr, o.src.ptr = cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src)
}

func (x steps) ReadPeers() { x.b.group.readPeers() }

func (x steps) Finish(errs []error) error { return x.b.group.finish(errs) }

func (x steps) Unlock() { x.b.group.unlock() }

func (x steps) Cause(err error) error { return x.b.group.ops[0].comm.bestCause(err) }
