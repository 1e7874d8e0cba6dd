package route

import (
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// This file enqueues operations that NCCL does not have, such as an all-reduce in blocks of 8-bit numbers or a dispatch to experts. A batch
// has one operation of each local rank, which the flight recorder has, whatever kernels and copies are its parts.

// TakeQuantized returns a function that enqueues the part of a local rank in an
// all-reduce of blocks of 8-bit numbers, one Chorus kernel, for EnqueueKernels.
// It returns nil if Chorus kernels do not execute the operation, alike on all
// ranks. In a group whose reductions are deterministic they do not, because
// Decide may give an all-reduce to NCCL; the bits are the same in both cases.
// The kernels are loaded, so that a failure comes before an operation is
// enqueued.
func (rs Routers) TakeQuantized(xs []fabric.Quantized) (launch func(*collective.Op) error, err error) {
	for i, k := range rs {
		if !k.ownKernels() || k.kernels == nil || k.ordered != nil || !k.kernels.TakesQuantized(&xs[i]) {
			return nil, nil
		}
	}
	for i, k := range rs {
		if err := k.kernels.LoadQuantized(&xs[i]); err != nil {
			return nil, err
		}
	}
	if len(rs) == 0 {
		return nil, nil
	}
	return func(x *collective.Op) error { return rs[x.Local].kernels.EnqueueQuantized(x.Stream, &xs[x.Local]) }, nil
}

// TakeNorms is TakeQuantized for an all-reduce with the norms of its sums, in one Chorus kernel. A group with deterministic reductions does
// not use the kernel: it rounds once, and larger operations, which it does not support, round twice.
func (rs Routers) TakeNorms(norms []fabric.Norm) (launch func(*collective.Op) error, err error) {
	for i, k := range rs {
		if !k.ownKernels() || k.kernels == nil || k.ordered != nil {
			return nil, nil
		}
		switch k.rule.Load().strategy {
		case OneShot:
			norms[i].Algorithm = fabric.OneShot
		case TwoShotPackets:
			norms[i].Algorithm = fabric.TwoShotPackets
		}
		if !k.kernels.TakesNorm(&norms[i]) {
			return nil, nil
		}
	}
	for i, k := range rs {
		if err := k.kernels.LoadNorm(norms[i].DType); err != nil {
			return nil, err
		}
	}
	if len(rs) == 0 {
		return nil, nil
	}
	return func(x *collective.Op) error { return rs[x.Local].kernels.EnqueueNorm(x.Stream, &norms[x.Local]) }, nil
}

// ownKernels reports whether the strategy executes operations that NCCL does not have by Chorus kernels, if there are any.
func (k *Router) ownKernels() bool {
	switch k.rule.Load().strategy {
	case OwnKernels, OneShot, TwoShotPackets, TwoShot, TwoShotLines, Pipelined, Tuned:
		return true
	}
	return false
}

// EnqueueKernels is Enqueue for one operation of each local rank, whose
// communicators are comms, and whose part launch enqueues by Chorus kernels.
func (b *Batch) EnqueueKernels(comms []*nccl.Communicator, ops []collective.Op, launch func(*collective.Op) error) error {
	b.launches = launch
	defer func() { b.launches = nil }()
	return b.enqueueOwn(comms, ops)
}

// EnqueueSteps is EnqueueKernels for operations that need no Chorus kernels between ranks. run enqueues the parts of all local ranks:
// kernels of each rank alone, and copies between ranks by move, whose Move.Operation is the index of the local rank. An error of run
// after a move is a collective.PartialError, and ends the communicators.
func (b *Batch) EnqueueSteps(comms []*nccl.Communicator, ops []collective.Op, run func(move func([]collective.Move) error) error) error {
	b.steps = run
	defer func() { b.steps = nil }()
	return b.enqueueOwn(comms, ops)
}

func (b *Batch) enqueueOwn(comms []*nccl.Communicator, ops []collective.Op) error {
	for i, c := range comms {
		if err := b.in.Add(collective.Of(c), &ops[i]); err != nil {
			b.Reset()
			return err
		}
	}
	return b.Enqueue()
}

func (b *Batch) executeSteps() error {
	moved := false
	err := b.steps(func(list []collective.Move) error {
		err := b.in.Move(list)
		moved = moved || err == nil
		return err
	})
	if err != nil && moved {
		return &collective.PartialError{Err: err}
	}
	return err
}
