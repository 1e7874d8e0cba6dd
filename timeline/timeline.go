// Package timeline records when the streams of the process run kernels, copies, collectives and
// graphs, what the host waits for, and the events of the allocator (torch.profiler). Ranges of
// package nvtx mark steps.
//
//	t, err := timeline.Start("timeline")
//	if err != nil {
//		return err
//	}
//	err = step()
//	err = errors.Join(err, t.Close())
//
// The variable CHORUS_TIMELINE records a whole program without a change. Each process writes one
// file to the directory. `chorus timeline merge` makes one file for all ranks that opens in
// https://ui.perfetto.dev, and `chorus timeline summary` prints how much of the communication is
// hidden behind kernels.
//
// On CUDA events measure the times of operations, so the timeline has the operations that Chorus
// enqueues and not the kernels of other libraries. An event ends each operation. An operation of an
// idle stream begins at an event before it. An operation of a busy stream begins at the latest end of
// the operations that it waits for, without a further event:
//
//   - The begin is early by at most the time of the call that enqueues the operation, if the earlier
//     operations end during the call.
//   - If the operation waits for another device, the begin has the error of the comparison of both
//     devices' clocks, which is some microseconds. Chorus compares the clocks again each second, so an
//     operation whose begin and end are read with different comparisons has an error of the same size.
//   - Parts of a collective always have two events each, because NCCL may work between them.
//   - Streams that other libraries may use (the default stream, stream.External, and a stream whose
//     Handle was called) always have two events for each operation.
//
// Recording never waits for the device: if the operations in flight on a device use 16384 events, or 65536
// records wait for the disk, further ones are dropped and counted. A graph is one operation. On virtual
// devices the times are exact, and a graph's operations are recorded one by one.
//
// Concurrency: all functions are safe for concurrent use.
package timeline

import "github.com/gochorus/chorus/internal/timeline"

// A Recording is a recording in progress.
type Recording struct{ r *timeline.Recorder }

// Start starts recording to a new file in the directory, which it creates if necessary. A process
// has at most one recording at a time.
func Start(dir string) (*Recording, error) {
	r, err := timeline.Start(dir)
	if err != nil {
		return nil, err
	}
	return &Recording{r}, nil
}

// Close stops the recording and writes the rest of the file. Operations that are in flight are
// recorded if they complete within five seconds. It returns the error of the writes. If a device
// or the disk hangs, it returns an error after fifteen seconds. It is idempotent and does nothing
// on nil.
func (r *Recording) Close() error {
	if r == nil || r.r == nil {
		return nil
	}
	return r.r.Close()
}
