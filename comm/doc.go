// Package comm is what most programs import: groups of ranks, each with a
// device, that move and reduce memory together.
//
// All GPUs of this machine in one process:
//
//	g, err := comm.Local(ctx, devs...)
//	defer g.Close()
//	xs, err := comm.Make[float32](g, n) // one slice for each local rank
//	defer xs.Close()
//	...
//	err = comm.AllReduce(g, comm.Sum, xs...) // enqueued on the group's streams
//	err = g.Wait(ctx)                        // only the host waits here
//
// One process a GPU, started by chorus run, torchrun, Slurm or MPI:
//
//	sess, err := cluster.Attach(ctx)
//	dev, err := device.Open(sess.LocalRank())
//	g, err := comm.Join(ctx, sess, dev)
//
// The names of other libraries:
//
//	CUDA, NCCL, PyTorch            here
//	ncclComm_t, process group      Group
//	ncclCommInitAll                Local
//	init_process_group             cluster.Attach and Join
//	DistributedDataParallel        Reducer
//	ZeroRedundancyOptimizer, FSDP  Sharder
//	stream of the process group    Group.Stream
//	Work, work.wait                Start, Work
//	watchdog                       Group.Wait
//	barrier                        Group.Barrier
//	all_reduce, all_gather, ...    AllReduce, AllGather, ...
//	broadcast, reduce              BroadcastFrom, ReduceTo
//	gather, scatter                GatherTo, ScatterFrom
//	all_gather_object              GatherValues
//	broadcast_object_list          BroadcastValue
//	torch.cuda.comm                Broadcast, Scatter, Gather, ReduceAdd, ...
//
// The plain names Broadcast, Scatter and Gather are those of torch.cuda.comm; where
// torch.distributed has the same ones, what it does has the root in its name.
//
// Every rank of a group must call the same collectives in the same order with
// the same lengths and types. Collectives are enqueued on the group's streams,
// one for each local rank, and return at once; they allocate nothing and start
// no goroutine. Order the group's streams with others by stream.Wait. Memory
// that was allocated on another stream is freed only when the group's stream is
// past it.
//
// torch.cuda.comm's functions work on tensors of any type and layout, for groups
// with all ranks in this process (Local). They run on the group's streams: a tensor
// that is given is in the order of the stream of its device, and a result is ready
// on that of its own, unless Scatter was told otherwise. They return at once, but
// for a result in host memory. Where torch returns the tensor that was given, they
// return one of the same memory with a share of its own, so that all results are
// closed alike.
//
// Where at most 16 MiB go from one device to others, one kernel of the device that has
// what all need, or gets what all have, reads or writes the others' memory itself; it waits
// for the streams of all of them, and they for it. A kernel copies rows too, however many.
// Where kernels do not reach the other devices, and for more bytes, NCCL and copy engines
// do it, as the functions say.
//
// Within nccl.Group there are the collectives of slices, Send and Recv. What waits for
// them, or enqueues work that uses their results, is refused with a *nccl.GroupError:
// nothing of such a group is enqueued before it ends.
//
// Errors: an argument error is found before anything is enqueued on any local
// rank. When a rank fails or is lost, the group is broken: what is in flight is
// aborted, and every later call returns an error that matches ErrBroken and
// wraps the first cause.
//
// Concurrency: operations of a group are enqueued whole, one after the other, whichever
// goroutines issue them; but in what order nobody knows then, so that a group over several
// processes, in which all must have the same, is for one goroutine, and so is what has
// an nccl.Group around it. Wait, Err and Close may be called by any goroutine at any time.
package comm
