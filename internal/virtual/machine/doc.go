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
//     (cudadrv.Auditor); a use of any other byte is then detected, too;
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
// NCCL, cuBLAS and cuFile are packages above this one, and the machine does not know them.
// A call of a library goes through these steps:
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
package machine
