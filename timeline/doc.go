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
// On CUDA a pair of events around each operation measures its time, so the timeline has the
// operations that Chorus enqueues and not the kernels of other libraries. Recording never waits for
// the device: if more than 8192 operations are in flight on a device, or 65536 records wait for the
// disk, further ones are dropped and counted. A graph is one operation. On virtual devices the
// times are exact, and a graph's operations are recorded one by one.
//
// Concurrency: all functions are safe for concurrent use.
package timeline
