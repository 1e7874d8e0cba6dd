package nccl

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
)

// NCCL before exactSymmetric has symmetric kernels that spoil what they write where a
// rank's part of an all-gather or a reduce-scatter is no multiple of symmetricUnit
// bytes, and where there are several in one group. Such operations are refused.
const (
	exactSymmetric = 22807
	symmetricUnit  = 8
)

// A span is the memory of a symmetric window.
type span struct{ from, to cudadrv.DevicePtr }

// addSpan notes a symmetric window.
func (c *Communicator) addSpan(s span) {
	c.spansMu.Lock()
	defer c.spansMu.Unlock()
	c.spans.Store(new(append(slices.Clone(c.symmetricSpans()), s)))
}

// dropSpan undoes addSpan.
func (c *Communicator) dropSpan(s span) {
	c.spansMu.Lock()
	defer c.spansMu.Unlock()
	list := slices.Clone(c.symmetricSpans())
	if i := slices.Index(list, s); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	c.spans.Store(&list)
}

func (c *Communicator) symmetricSpans() []span {
	if list := c.spans.Load(); list != nil {
		return *list
	}
	return nil
}

// Symmetric reports whether NCCL has a kernel for such a collective of memory in
// symmetric windows that is right. For Chorus's own packages.
func (c *Communicator) Symmetric(x Collective) bool {
	k := slices.Index(collectiveKinds[:], x.Kind)
	return x.Kind != 0 && symmetricKernel(kind(k), x.DType, x.Op) && !c.spoils(kind(k), x.Count*x.DType.Size())
}

// symmetricKernel reports whether NCCL has a symmetric kernel for an operation.
func symmetricKernel(k kind, t memory.DType, op Op) bool {
	switch k {
	case allGather:
		return true
	case allReduce, reduceScatter:
		switch t {
		case memory.Float16T, memory.BFloat16T, memory.Float32, memory.Float8E4M3T, memory.Float8E5M2T:
			return op == Sum
		}
	}
	return false
}

// spoils reports whether the symmetric kernel is wrong for so many bytes of a part.
func (c *Communicator) spoils(k kind, part int) bool {
	return c.version < exactSymmetric && (k == allGather || k == reduceScatter) && part%symmetricUnit != 0
}

// symmetric reports whether the operation gets a symmetric kernel.
func (o *operation) symmetric() bool {
	spans := o.comm.symmetricSpans()
	return len(spans) > 0 && symmetricKernel(o.kind, o.dtype, o.op) && o.dst.within(spans, o.dtype) && o.src.within(spans, o.dtype)
}

// within reports whether an operand lies in one of the spans.
func (x operand) within(spans []span, t memory.DType) bool {
	end := x.ptr + cudadrv.DevicePtr(x.len*t.Size())
	return slices.ContainsFunc(spans, func(s span) bool { return s.from <= x.ptr && end <= s.to })
}

// checkSymmetric refuses an operation that NCCL would spoil.
func (o *operation) checkSymmetric() error {
	if part := o.n * o.dtype.Size(); o.symmetric() && o.comm.spoils(o.kind, part) {
		return o.tooOld(fmt.Sprintf("%d bytes of each rank in symmetric windows: NCCL %s spoils what is no multiple of %d bytes: pad it",
			part, o.comm.Version(), symmetricUnit))
	}
	return nil
}

// checkSymmetric refuses a group that NCCL would spoil.
func (g *group) checkSymmetric() error {
	for i := range g.ops {
		o := &g.ops[i]
		if o.comm.spans.Load() == nil || o.comm.version >= exactSymmetric || !o.symmetric() {
			continue
		}
		for j := range g.ops[:i] {
			if p := &g.ops[j]; p.comm == o.comm && p.symmetric() {
				return o.tooOld(fmt.Sprintf("it is in one group with another operation, %s, both in symmetric windows: NCCL %s spoils several: issue them one after the other",
					p.kind, o.comm.Version()))
			}
		}
	}
	return nil
}

func (o *operation) tooOld(why string) error {
	return fmt.Errorf("nccl: %s on rank %d of %d: %s, or use NCCL 2.28.7 or newer: %w", o.kind, o.comm.rank, o.comm.size, why, ErrorInvalidUsage)
}
