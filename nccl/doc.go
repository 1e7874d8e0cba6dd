// Package nccl is a binding of NCCL: each Communicator is one rank of one NCCL
// communicator. Most programs use package comm, which is built on it.
//
//	id, err := nccl.NewUniqueID(dev) // on one rank; give its 128 bytes to the others
//	c, err := nccl.NewCommunicator(ctx, dev, id, rank, size, nil)
//	if err != nil {
//		return err
//	}
//	defer c.Close()
//	err = nccl.AllReduce(c, s, dst, src, nccl.Sum) // enqueued on s
//	err = c.Wait(ctx, s)                           // the host waits; a failed peer ends the wait
//
// Collective means: every rank must call it, in the same order, with the same element
// count and type. NCCL itself does not check that, and hangs or corrupts data. Virtual
// devices check it and name the two ranks that differ. [AllGatherV], [ReduceScatterV] and
// [AllToAllV] take an element count for each rank.
//
// All collectives are enqueued on the given stream, return at once, allocate nothing and
// start no goroutine. Only the first one of a kind may block until the other ranks call it
// too, because NCCL connects the ranks then. A collective connects NCCL's ring or its tree. A send, a receive, or a
// collective that consists of them (AllToAll, Gather, Scatter) connects each direction with a peer. Abort and the deadline
// of the operation end that wait as well. The first one
// may be captured into a graph, but not in the mode graph.Global. If a collective returns
// an error, it was not enqueued on this rank.
//
// A host that is far ahead of the device waits in a call. If a communicator has ranks in several processes, an operation
// waits until the one that was issued about 256 operations before has ended (CHORUS_NCCL_IN_FLIGHT). The communicator can then
// be aborted within about a second. If no operation ends for a second, the calls go on without that wait until one does.
//
// A collective is not always a barrier: a rank waits only for the ranks whose data it needs. The root of a
// broadcast or a scatter, the other ranks of a reduction or a gather to one, and senders do not wait. In an empty
// collective no rank waits.
//
// Concurrency: calls on one communicator are serialized. The order of the operations must
// be the same on all ranks, so in practice one goroutine issues them. Abort, Close and Err
// may be called by any goroutine at any time. If one goroutine drives several
// communicators, it must issue their operations together: in a [Batch], or within [Group].
//
// Every operation has a deadline (Config.Timeout). If an operation has not completed by
// then, or NCCL reports that it failed, the communicator fails: it is aborted together
// with the other ranks of this process, and all their calls return the first cause. The
// error names the ranks of this process that are behind. Operations of the ranks in one
// process are also compared when they are issued: if they differ, the error is a
// *MismatchError. [Communicator.Trace] and [DumpTrace] return the latest operations. They lack
// one-sided operations and launches of graphs, which have the same deadline. Of launches they only
// have how many collectives these had.
//
// Config has the options of a communicator, and [With] those of single collectives. Split,
// Shrink and Grow make communicators from others. Chorus binds NCCL up to 2.32. Functions and
// options that the loaded NCCL lacks return a *device.UnsupportedError that names the version
// that has them.
//
// On virtual devices, the one-sided operations [Put], [Signal] and [WaitSignal] work between ranks of one process only: between
// processes, within [Group] and in graphs they return an error.
//
// Lifetime: Close ends the communicator at once and aborts pending operations
// (ncclCommAbort). Shutdown waits for the operations and leaves together with the other
// ranks (ncclCommFinalize, ncclCommDestroy).
package nccl
