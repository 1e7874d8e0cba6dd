// Package perf measures and checks the communication of GPUs, and says which GPU, link or host is slow or wrong. It is
// the library behind chorus perf and chorus preflight, for tools that need the results as data.
//
// [Check] and [CheckDevices] are a preflight check: they test each GPU alone, each two GPUs in rounds, and all
// together by all-reduces. Every byte is compared. The [CheckReport] has all measurements, and a [Finding] for each
// fault with the UUID, the PCI address and the host of what to repair. [Limits] decide what is slow.
//
// [Run] measures collectives like NVIDIA's nccl-tests, without MPI and without a compiler: operations, names, counts
// and definitions of bandwidth are the same. It also times single operations and checks every element.
// [MeasurePairs] measures each pair of ranks while the others wait.
//
// All ranks of a comm.Group call these functions with the same plan or configuration, and receive the same results.
// Each local rank has a goroutine that is locked to an OS thread, so that the ranks of one process launch
// concurrently. Times are of the devices, in µs. Bandwidths are in 10^9 bytes a second. On virtual devices the data is
// checked, and times say nothing.
package perf
