// Package health checks whether a host is ready for a job on its GPUs. It is the library behind chorus doctor, for
// tools that want the results as data: agents of node health, operators, admission checks.
//
// Each hazard is a [Check]: a name, the source of the evidence, and a function that reads it from a [Host]. The
// function returns a [Result] for the host, or one for each GPU or link. A result has the verdict, what was found,
// what a healthy host has, what the difference causes, and what cures it. Evidence that could not be read gives the
// verdict [Unknown] with the reason, and never [Pass] or [Fail], so that a container without permissions is not
// taken for a healthy or a broken host.
//
// [Run] runs checks concurrently and returns when its context ends, also if a call of a driver hangs. [Exchange] and
// [Compare] compare the hosts of a job. Checks are read-only: except those with Measures, they do not load the GPUs,
// and none changes a setting.
//
// docs/DOCTOR.md lists the checks. [Checks] has them as a table, to which a tool may append its own.
package health
