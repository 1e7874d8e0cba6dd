// Package fabric has collectives between the GPUs of one host by Chorus's own kernels,
// over memory that all of them have mapped. They are for what is small: an operation
// takes a few microseconds, from which no library's protocol is to be subtracted.
//
// Open makes a rank of a group. Each rank has scratch memory into which the others
// write, and an operation is one kernel of each rank: it sends, waits for what the
// others send, and reduces that in the order of the ranks, so that all of them have the
// same bits. Nothing of an operation but its addresses and what it is comes from the host,
// so graphs may capture operations and launch them between others.
//
// As with NCCL, all ranks must have the same operations in the same order, with the
// same lengths, types and reductions. What they send carries a signature of these: ranks
// that disagree wait for each other, until they are aborted, and have no result. A rank's
// operations run one after the other: where one is on another stream than the one before,
// or in a graph that is launched there, it waits for that. While a rank waits for the
// others its kernel keeps multiprocessors busy; Abort ends the waiting.
package fabric
