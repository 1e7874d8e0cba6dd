// Package perf measures collectives as NVIDIA's nccl-tests do, without MPI and
// without a compiler: the same operations under the same names, the same counts
// for a size, the same definitions of bandwidth. It also times single operations,
// pairs of ranks and round trips, checks every element, and compares with an
// earlier run.
//
// All ranks of a comm.Group run the same Plan; each of them gets the same results.
// Every local rank has a goroutine that keeps its OS thread, so that the launches
// of one process do not wait for each other.
package perf
