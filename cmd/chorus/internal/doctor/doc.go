// Package doctor checks whether a host is ready for a job on its GPUs. Each hazard is a [Check]
// that reads evidence from a [Host] and returns results. A value that could not be read gives the
// verdict [Unknown] with the reason, and never [Pass] or [Fail].
//
// [Run] runs checks concurrently with a deadline. [Compare] compares the hosts of a job.
package doctor
