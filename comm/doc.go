// Package comm is the package that most programs import. It creates groups of ranks, each
// with a device, that move and reduce memory together.
//
// One process for each GPU, started by chorus run, torchrun, Slurm, MPI or Kubernetes, or one
// process alone:
//
//	g, err := comm.Init(ctx, nil)
//	defer g.Close()
//	xs, err := comm.Make[float32](g, n) // one slice for each local rank
//	defer xs.Close()
//	...
//	err = comm.AllReduce(g, comm.Sum, xs...) // enqueued on the group's streams
//	err = g.Wait(ctx)                        // only the host waits here
//	err = g.Shutdown(ctx)                    // leaves the job together with the other ranks
//
// All GPUs of this machine in one process:
//
//	g, err := comm.Local(ctx, nil, nil)
//
// The names of other libraries:
//
//	CUDA, NCCL, PyTorch            here
//	ncclComm_t, process group      Group
//	ncclCommInitAll                Local
//	ncclCommInitRank in a group    JoinDevices
//	init_process_group             Init, or cluster.Attach and Join
//	destroy_process_group          Group.Shutdown, Group.Close
//	DistributedDataParallel        package ddp
//	ZeroRedundancyOptimizer, FSDP  package ddp
//	stream of the process group    Group.Stream
//	Work, work.wait                Start, Work
//	watchdog                       Group.Wait
//	barrier                        Group.Barrier
//	all_reduce, all_gather, ...    AllReduce, AllGather, ...
//	broadcast, reduce              BroadcastFrom, ReduceTo
//	gather, scatter                GatherTo, ScatterFrom
//	all_gather_object              GatherValues
//	broadcast_object_list          BroadcastValue
//	scatter_object_list            ScatterValues
//	send_object_list, recv_...     SendValue, RecvValue
//	collectives of tensors         OfTensors
//	DeepEP's dispatch, combine     Experts
//	_set_pg_timeout, timeout=...   Group.SetTimeout, Batch.SetTimeout
//	torch.cuda.comm                Broadcast, Scatter, Gather, ReduceAdd, ...
//
// Broadcast, Scatter and Gather have the meaning of torch.cuda.comm. If
// torch.distributed uses the same name, the function here has the root in its name.
//
// Every rank of a group must call the same collectives in the same order with the same
// lengths and types. Collectives are enqueued on the group's streams, one for each local
// rank, and return at once; they allocate nothing and start no goroutine. Only a host that is
// hundreds of operations ahead waits; see CHORUS_NCCL_IN_FLIGHT in docs/ENVIRONMENT.md. Order the
// group's streams with other streams by stream.Wait. Memory that was allocated on another
// stream is freed only after the group's stream has passed its last use.
//
// The functions of torch.cuda.comm work on tensors of any type and layout, for groups with
// all ranks in this process ([Local]). They run on the group's streams: an argument must
// be ordered with the stream of its device, and a result is ready on the stream of the
// result's device, unless Scatter was given other streams. They return at once, unless the result
// is in host memory. If torch would return its argument, these functions return a new
// reference to the same memory, so that the caller closes all results in the same way.
//
// If at most 16 MiB move between one device and the others, one kernel on that device
// reads or writes the memory of the other devices directly. It waits for the streams of
// all these devices, and they wait for it. A kernel also copies strided rows of any size. NCCL
// or copy engines are used for more bytes, and if kernels cannot access the other devices;
// see the functions.
//
// Collectives of slices, Send and Recv take an [Issuer]: a [Group] enqueues each operation
// at once, and a [Batch] enqueues several together:
//
//	err := g.Batch(func(b *comm.Batch) error {
//		return errors.Join(comm.Send(b, next, x), comm.Recv(b, previous, y))
//	})
//
// The bits of a reduction may depend on its length, the strategy and NCCL's version. With
// [Config.Deterministic] they do not: see [Order].
//
// Calls that wait for operations do not wait for a batch that is not enqueued yet.
//
// Errors: all arguments are validated before any local rank enqueues work. When a rank
// fails or is lost, the group is broken: pending operations are aborted, and every later
// call returns an error that matches [ErrBroken] and wraps the first cause. It also matches [ErrLeft] if another process
// has closed the group and has not failed.
//
// Concurrency: operations of a group may be enqueued by several goroutines; each is
// enqueued as a whole, but their order is then unspecified. All processes of a group must
// use the same order, so a group over several processes needs a single issuing goroutine.
// Wait, Err and Close may be called by any goroutine at any time.
package comm
