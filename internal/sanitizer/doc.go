// Package sanitizer finds uses of device memory that no event orders, and uses of freed
// memory, on any backend: the counterpart of torch.cuda._sanitizer. It decorates the driver,
// NCCL and cuFile. Their calls tell the operations, their streams, and the events, waits and
// synchronizations that order them. The sanitizer computes the order when the calls are made;
// it neither waits for the device nor reads its memory.
//
// The sanitizer tracks memory that the decorated driver allocates. It misses races on other
// memory and of unknown operations, and never reports them falsely:
//   - memory that others allocated: other libraries, other processes (IPC)
//   - kernels loaded without package kernel, addresses passed as kernel.Address or in structs
//   - pointers whose parameter it cannot parse count as reads
//   - writes of NCCL's windows by other ranks
//   - conflicts between two devices that NCCL or Chorus kernels for collectives synchronize:
//     operations of other ranks order them, which may be enqueued later
package sanitizer
