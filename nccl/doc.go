// Package nccl is one rank of one NCCL communicator: NCCL's vocabulary with
// Go's manners. Most programs use package comm, which is built on it.
//
//	id, err := nccl.NewUniqueID(dev) // on one rank; give its 128 bytes to the others
//	c, err := nccl.NewCommunicator(ctx, dev, id, rank, size, nil)
//	if err != nil {
//		return err
//	}
//	defer c.Close()
//	err = nccl.AllReduce(c, s, dst, src, nccl.Sum) // enqueued on s
//	err = c.Wait(ctx, s)                           // the host waits; a failed peer ends it
//
// Collective means: every rank must call it, in the same order, with the same
// element count and type. NCCL itself does not check that, and hangs or mixes
// data up; virtual devices check it and name the two ranks that differ. AllGatherV,
// ReduceScatterV and AllToAllV take an element count for each rank.
//
// All collectives are enqueued on the stream that is given, return at once,
// allocate nothing and start no goroutine. Only the first one of a kind may
// block, until the other ranks call it too, because NCCL connects them then;
// Abort ends that as well. It may be captured into a graph, but not in the mode
// graph.Global. An error from one means that it was not enqueued on this rank.
//
// Concurrency: calls on one communicator are serialised; the order in which
// goroutines issue them must be the same on all ranks, so in practice one
// goroutine issues them. Abort, Close and Err may be called by any goroutine at
// any time. Several communicators of one goroutine's devices must be driven
// within Group.
//
// Every operation has a deadline (Config.Timeout). One that has not completed by
// then, or that NCCL reports to have failed, fails the communicator: it is aborted,
// with the other ranks of this process, and all their calls return the first cause,
// which names the ranks of this process that are behind. Ranks of one process are
// also compared when they issue: a *MismatchError is an operation that another one
// has issued differently. Trace and DumpTrace tell what was issued last.
//
// Split, Shrink and Grow make communicators from others. Functions that the loaded
// NCCL lacks return a *device.UnsupportedError that names the version that has them.
//
// Lifetime: Close ends the communicator at once, whatever is in flight
// (ncclCommAbort); Shutdown waits for the work and leaves together with the
// others (ncclCommFinalize, ncclCommDestroy).
package nccl
