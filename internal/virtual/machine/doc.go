// Package machine implements virtual GPUs in host memory, stricter than hardware: devices,
// streams, memory and graphs, and the CUDA driver that controls them.
//
// A Machine is a set of devices. A virtual device always rejects mistakes that a real
// device sometimes tolerates:
//
//   - a context bound by CtxSetCurrent is valid for one call only;
//   - streams run late and out of step with each other, by a seed that every
//     report contains;
//   - new and freed memory is poisoned; its addresses are not host addresses and
//     are never reused;
//   - an allocator that divides blocks can declare the pieces that it has allocated
//     (cudadrv.Auditor); a use of any other byte is then detected, too, and so is one by a graph
//     of bytes that were allocated again since the capture;
//   - memory can be unmapped and closed only after the host has waited for its uses;
//   - if two operations touch the same bytes without an order between their streams,
//     and one of the two writes, the race is reported and the device is lost;
//   - calls wait for a device where CUDA's driver does, host functions of a device run on one
//     thread, and streams share hardware queues; a wait that cannot end loses the device;
//   - a lost device stays lost;
//   - a stream holds 1024 operations; further launches wait for space, and meanwhile
//     all other calls for that device block.
//
// Explain describes why a device was lost, in more detail than a status code.
//
// All methods are safe for concurrent use. As in CUDA, the current context belongs to
// the OS thread.
//
// # Libraries
//
// NCCL is a package above this one. cuBLAS, cuBLASLt and cuFile have files here (cublas*.go, cufile.go), and
// the machine does not know them either. A call of a library goes through these steps:
//
//   - [Machine.Fault] counts the call and returns its planned fault, [Machine.Unbind] and
//     [Machine.Retained] return the device of the calling thread's context, and
//     [Machine.Permits] checks the captures in progress;
//   - [Machine.Lock] locks the machine, and [Machine.Stream] looks up the stream;
//   - [Stream.EnqueueCall] or [Stream.EnqueueAlways] appends an operation. To record a
//     launch in a graph, the library implements [Launch] and calls [Capture.AddLaunch];
//   - [Machine.Drain] waits for a device, as the library's own allocations and kernels do;
//   - when the operation runs, [Op.Touch] returns the bytes at an address. It fails if the
//     device must not use the bytes, or on a race;
//   - [Op.Fail] loses the device, and [Machine.Report] reports a mistake.
//
// An operation of the host, such as a read of a file, is a [Machine.HostOp].
//
// # Products
//
// cuBLAS and cuBLASLt use gonum's matrix products. cuBLASLt supports the products that a
// Hopper GPU supports, except some that the documentation leaves unclear:
//
//   - Inputs of one type, or a mix of float8_e4m3fn and float8_e5m2, with the outputs that
//     supported lists.
//   - 8-bit floats need a transposed A, a B that is not, and multiples of 16.
//   - Outputs must not share memory with inputs, workspaces need 256-byte alignment, and
//     pointers need the alignment that the algorithm was chosen with.
//
// Rounding: inputs are widened exactly, multiplied and added in float32 (float64 for
// float64, float16 after each addition for the compute type of 16 bits). Inputs of TF32
// products are rounded to TF32 first. An algorithm that splits k adds the parts in float32;
// with the reduction scheme of the output type each part is rounded to that type. Each step
// of the epilogue is rounded to float32. The result is rounded once to the output type, and
// saturates for 8-bit floats.
package machine
