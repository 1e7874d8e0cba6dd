// Package graph captures the work of streams once and launches it many times:
// one call for the host instead of one for each operation.
//
//	exec, err := graph.Capture(streams, func() error { // on every stream of streams
//		return step() // what it enqueues is recorded and does not run
//	})
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
// A graph has the addresses and numbers of the capture: inputs and outputs are
// static, so programs copy into and out of the same slices around a launch.
//
// Random numbers are not such numbers: each launch goes on where the generator is
// then, as the same fills without a graph would (torch.cuda.graph).
//
// What a capture may contain: kernels, copies between devices and from and to
// pinned memory, Zero, events and waits, matrix products, random numbers, the
// operations of nccl and comm, and allocating memory. What it may not: waits of
// the host (Sync, Query, Wait of a group), copies from and to ordinary host
// memory, and closing memory that the graph may use, all of which fail at once
// with a *stream.CaptureError that names the call; the capture goes on. Unless the
// mode is Relaxed, the host must not wait for other streams and events either, nor
// ask for them, on the goroutine that captures; in the mode Global on no goroutine.
// docs/CAPTURES.md has a row for every call. Run the work once before the capture,
// as NewCallable does: cuBLAS makes its workspace on first use, which a capture
// forbids. NCCL may connect the ranks in a capture, except in the mode Global.
// Kernels may be loaded in a capture.
//
// Memory that is allocated in a capture comes from the capture's memory.Pool.
// What the captured function closes again is used by its later allocations; what
// it leaves open, such as outputs, has its contents after each launch. Graphs
// that are launched in turn can share a pool: Config.Pool.
//
// Memory and kernel modules that a graph uses must outlive it, and so must a
// stream on which a matrix product was captured: it keeps cuBLAS's workspace. A
// communicator that a graph uses cannot be closed before the graph. Buffers are
// used on the stream of the launch: call RecordStream for it where it is not
// their own.
//
// Concurrency: an Exec may be used by several goroutines. Launches of one Exec
// run one after another, whatever their streams.
package graph
