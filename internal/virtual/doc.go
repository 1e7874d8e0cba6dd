// Package virtual is a machine of virtual GPUs: the CUDA driver, NCCL, cuBLAS and
// cuFile interfaces carried out in host memory, stricter than hardware.
//
// A Machine is one set of devices. What real devices forgive sometimes, a
// virtual one refuses always:
//
//   - the context that CtxSetCurrent binds serves one call only;
//   - streams run late and out of step with each other, from a seed that every
//     report names;
//   - new and freed memory is poisoned, and its addresses are no host addresses
//     and are never given out twice;
//   - an allocator that divides blocks can say which pieces it has given out
//     (cudadrv.Auditor), and a use of any other byte is found, too;
//   - memory is unmapped and closed only when the host has waited for its uses;
//   - two operations that touch the same bytes without an order between their
//     streams, one of them writing, are reported and lose the device;
//   - a stream takes 1024 operations; then launches wait for room, and no other thread gets
//     an answer from the driver for that device meanwhile;
//   - ranks that issue different collectives are told which two differ;
//   - a file is read into memory only when the host has waited for the memory's
//     uses, and files and memory are given up only when no transfer uses them.
//
// Explain says in a sentence why a device was lost, which no status can.
//
// Ranks of a communicator find each other through the unique id alone, in one
// process or in several, over Unix-domain sockets (or TCP, see Config).
//
// All methods may be called from any goroutine; as in CUDA, what is current to
// a thread is current to the OS thread.
package virtual
