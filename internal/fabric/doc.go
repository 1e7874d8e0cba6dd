// Package fabric has the Chorus kernels for collectives between the GPUs of one host, over
// memory that all these GPUs map. They are for small sizes: an operation takes a few
// microseconds, less than the protocol of a general library.
//
// Open opens a rank of a group. Each rank has scratch memory that the other ranks write
// to. An operation is one kernel on each rank: it sends, waits for the data of the other
// ranks, and reduces it in rank order. All ranks get bitwise identical results. The host
// supplies only the addresses, the length and the signature, so graphs may capture
// operations and launch them between other operations.
//
// As with NCCL, all ranks must issue the same operations in the same order, with the same
// lengths, types and reductions. The data carries a signature of these properties. If ranks
// disagree, they wait for each other until they are aborted, and do not get a result. A
// rank's operations run one after the other, also on different streams and in graphs. While
// a rank waits for the others, its kernel occupies multiprocessors; Abort ends the wait.
package fabric
