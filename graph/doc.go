// Package graph captures the work of streams once and launches it many times:
// one call for the host instead of one for each operation.
//
//	exec, err := graph.Capture(streams, step, nil) // step enqueues on streams; nothing runs yet
//	if err != nil {
//		return err
//	}
//	defer exec.Close()
//	for range steps {
//		... // new inputs go into the same memory
//		if err := exec.Launch(s); err != nil { // on any stream
//			return err
//		}
//	}
//
// A graph has the addresses and numbers of the capture: inputs and outputs are static, so
// programs copy into and out of the same slices around a launch.
//
// Random numbers are an exception: each launch continues the sequence of the generator, as
// the same fills without a graph would (torch.cuda.graph).
//
// A capture may contain kernels, copies between devices and from and to pinned memory,
// Zero, events and waits, matrix products, random numbers, operations of nccl and comm,
// and allocations of memory. It may not contain waits of the host (Sync, Query, Wait of a
// group), copies from and to ordinary host memory, and closing memory that the graph may
// use. These calls fail at once with a *device.CaptureError that names the call; the
// capture continues. Unless the mode is Relaxed, the capturing goroutine must not wait for
// other streams and events or query them; in the mode Global no goroutine may.
// docs/CAPTURES.md has a row for every call. Run the work once before the capture, as
// NewCallable does, so that first uses do not take place in the capture. NCCL may connect the
// ranks in a capture, except in the mode Global. Kernels may be loaded in a capture, and a
// stream may compute its first matrix product there.
//
// Memory that is allocated in a capture comes from the capture's memory.Pool. If the
// captured function closes memory, its later allocations reuse it. Memory that stays open,
// such as outputs, has its contents after each launch. Graphs that are launched one after
// another can share a pool: Config.Pool.
//
// Memory and kernel modules that a graph uses must outlive it. The workspaces of captured
// matrix products belong to the graph. A communicator that a graph uses cannot be closed
// before the graph. The same holds for comm.Experts, checkpoint.Transfer, optim.Optimizer,
// optim.Grads, amp.Scaler, and Reducer, Sharder and Units of package ddp: Close fails while a
// graph that has captured their calls is open. Buffers are used on the stream of
// the launch: if that is not the buffer's own stream, call RecordStream with it.
//
// Concurrency: an Exec may be used by several goroutines. Launches of one Exec
// run one after another, whatever their streams.
package graph
