package nccl

import (
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
)

// Before version exactSymmetric, NCCL's symmetric kernels corrupt their output if a rank's
// part of an all-gather or a reduce-scatter is not a multiple of symmetricUnit bytes, and
// if a group has several such collectives. Chorus refuses these operations.
const (
	exactSymmetric = 22807
	symmetricUnit  = 8
)

// With versions from staleSymmetric to before freshSymmetric, symmetric kernels are reported to read data in a graph that
// a kernel before them has not written yet. Chorus itself does not choose them in captures. Operations on windows that the
// program has registered are not refused, because no test of ours has reproduced the report.
const (
	staleSymmetric = 22800
	freshSymmetric = 23007
)

// symmetricKernelStale reports whether symmetric kernels may read stale data in graphs.
func (c *Communicator) symmetricKernelStale() bool {
	return c.version >= staleSymmetric && c.version < freshSymmetric
}

// A span is the memory of a symmetric window.
type span struct{ from, to cudadrv.DevicePtr }

// addSpan records a symmetric window.
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

// symmetricKernel reports whether NCCL has a symmetric kernel for an operation.
func symmetricKernel(k flight.Kind, t memory.DType, op flight.Reduction) bool {
	switch k {
	case flight.AllGather:
		return true
	case flight.AllReduce, flight.ReduceScatter:
		switch t {
		case memory.Float16, memory.BFloat16, memory.Float32, memory.Float8E4M3, memory.Float8E5M2:
			return op == flight.Sum
		}
	}
	return false
}

// symmetricKernelWrong reports whether the symmetric kernel is incorrect for a part of the given size.
func (c *Communicator) symmetricKernelWrong(k flight.Kind, part int) bool {
	return c.version < exactSymmetric && (k == flight.AllGather || k == flight.ReduceScatter) && part%symmetricUnit != 0
}

// symmetric reports whether NCCL will use a symmetric kernel for the operation.
func (o *operation) symmetric() bool {
	spans := o.comm.symmetricSpans()
	return len(spans) > 0 && symmetricKernel(o.Kind, o.DType, o.Reduction) && o.dst.within(spans, o.DType) && o.src.within(spans, o.DType)
}

// within reports whether an operand lies in one of the spans.
func (x operand) within(spans []span, t memory.DType) bool {
	end := x.ptr + cudadrv.DevicePtr(x.len*t.Size())
	return slices.ContainsFunc(spans, func(s span) bool { return s.from <= x.ptr && end <= s.to })
}

// checkSymmetric refuses an operation that NCCL's kernel computes incorrectly.
func (o *operation) checkSymmetric() error {
	if part := o.N * o.DType.Size(); o.symmetric() && o.comm.symmetricKernelWrong(o.Kind, part) {
		return o.errTooOld(fmt.Sprintf("%d bytes of each rank in symmetric windows: NCCL %s corrupts sizes that are not a multiple of %d bytes: pad the part",
			part, ncclapi.VersionText(o.comm.version), symmetricUnit))
	}
	return nil
}

// checkSymmetric refuses a group that NCCL's kernels compute incorrectly.
func (g *group) checkSymmetric() error {
	for i := range g.ops {
		o := &g.ops[i]
		if o.comm.spans.Load() == nil || o.comm.version >= exactSymmetric || !o.symmetric() {
			continue
		}
		for j := range g.ops[:i] {
			if p := &g.ops[j]; p.comm == o.comm && p.symmetric() {
				return o.errTooOld(fmt.Sprintf("it is in one group with another operation, %s, both in symmetric windows: NCCL %s corrupts the results: issue them one after the other",
					p.Kind, ncclapi.VersionText(o.comm.version)))
			}
		}
	}
	return nil
}

func (o *operation) errTooOld(why string) error {
	return fmt.Errorf("nccl: %s on rank %d of %d: %s, or use NCCL 2.28.7 or newer: %w", o.Kind, o.comm.rank, o.comm.size, why, ErrorInvalidUsage)
}
