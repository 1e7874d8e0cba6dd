// Package perf measures collectives like NVIDIA's nccl-tests, without MPI and
// without a compiler. Operations, names, counts and definitions of bandwidth are
// the same. It also times single operations, pairs of ranks and round trips, checks
// every element, and compares results with an earlier run.
//
// All ranks of a comm.Group run the same Plan and receive the same results. Each
// local rank has a goroutine that is locked to an OS thread, so that the ranks of
// one process launch concurrently.
package perf
