// Package timeline records what the streams and the host did and when, and writes it to a file
// for each process. The virtual devices, package gpu, the flight recorder, the allocator and
// nvtx report to the recorder that is current. `chorus timeline` reads the files.
//
// A file has one JSON object a line: a header, and then records in any order. Times are
// nanoseconds since the origin in the header.
package timeline
