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
// Every asynchronous call of Chorus names its stream: one of New, one that the
// process shares (FromPool), the device's Default, or one that other code has
// made (External). Work of two streams is ordered only by an Event: Record it on
// the one and Wait for it on the other, which costs the host nothing.
//
// Concurrency: a stream or an event may be used by several goroutines; the
// order of their work is then the order in which their calls happen to arrive.
//
// Lifetime: Close is idempotent and never waits; work that was enqueued still
// runs.
package stream
