// Package stream orders work on a device: streams, events and waits.
//
//	s, err := stream.New(dev, nil)
//	if err != nil {
//		return err
//	}
//	defer s.Close()
//	... // enqueue work on s
//	return s.Sync(ctx) // wait for it
//
// Every asynchronous call of Chorus names its stream: a stream of New, a stream that the
// process shares (FromPool), the device's Default, or a stream that other code has made
// (External). Only an Event orders the work of two streams: Record it on one and Wait for
// it on the other. The host does not wait.
//
// Concurrency: a stream or an event may be used by several goroutines; their operations
// are then enqueued in the order that their calls arrive.
//
// Lifetime: Close is idempotent and never waits; operations that are already enqueued
// still run.
package stream
