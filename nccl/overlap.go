package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// checkOverlap refuses buffers that share memory in another way than in place.
func (o *operation) checkOverlap() error {
	size := cudadrv.DevicePtr(o.dtype.Size())
	d, s := o.dst.ptr, o.src.ptr
	if d+cudadrv.DevicePtr(o.dst.len)*size <= s || s+cudadrv.DevicePtr(o.src.len)*size <= d {
		return nil
	}
	if k := &kinds[o.kind]; d == s && k.dst == one && k.src == one {
		return nil
	}
	return o.checkInPlace()
}

// checkInPlace refuses buffers that overlap, unless the one is the rank's part of the other.
func (o *operation) checkInPlace() error {
	if o.dst.len == 0 || o.src.len == 0 {
		return nil
	}
	part := cudadrv.DevicePtr(o.part() * o.dtype.Size())
	switch k := &kinds[o.kind]; {
	case k.dst == all && k.src == one && o.src.ptr == o.dst.ptr+part,
		k.dst == one && k.src == all && o.dst.ptr == o.src.ptr+part:
		return nil
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: the destination and the source overlap: %s",
		o.kind, o.comm.rank, o.comm.size, o.kind.inPlace())
}

// inPlace says how the two buffers of an operation may share memory.
func (k kind) inPlace() string {
	switch d := &kinds[k]; {
	case d.dst == one && d.src == one:
		return "want the same memory or none in common"
	case d.dst == all && d.src == one:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.dst == one && d.src == all:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part is where the rank's part begins in a buffer that has those of all ranks.
func (o *operation) part() (at int) {
	if o.sends == nil {
		return o.comm.rank * o.n
	}
	for _, n := range o.sends[:o.comm.rank] {
		at += n
	}
	return at
}
