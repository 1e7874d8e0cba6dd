package stream

import "github.com/gochorus/chorus/internal/gpu"

// recordExternal records the event on a captured stream, for each launch of the graph.
func (e *Event) recordExternal(s *Stream) error {
	if err := gpu.StreamOf(s).Captured((*recordedEvent)(e)); err != nil {
		return err
	}
	return gpu.DeviceOf(e.dev).RecordExternal(gpu.EventOf(e), gpu.StreamOf(s).Raw())
}

// waitExternal makes a captured stream wait for the event in each launch of the graph.
func (s *Stream) waitExternal(e *Event) error {
	g := gpu.StreamOf(s)
	if err := g.Captured((*awaitedEvent)(e)); err != nil {
		return err
	}
	return gpu.DeviceOf(s.dev).WaitExternal(g.Raw(), gpu.EventOf(e))
}

// hold keeps the event in the driver for a graph.
func (e *Event) hold() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.graphs++
}

// letGo destroys the event if it is closed and no graph has it any more.
func (e *Event) letGo() {
	e.mu.Lock()
	e.graphs--
	last := e.graphs == 0 && e.closed
	e.mu.Unlock()
	if last {
		_ = gpu.DeviceOf(e.dev).DestroyEvent(gpu.EventOf(e)) // a lost device has reported its error
	}
}

// An awaitedEvent is an event that graphs wait for.
type awaitedEvent Event

func (e *awaitedEvent) Hold(gpu.Holder)  { (*Event)(e).hold() }
func (e *awaitedEvent) LetGo(gpu.Holder) { (*Event)(e).letGo() }

// A recordedEvent is an event that graphs record.
type recordedEvent Event

func (e *recordedEvent) Hold(gpu.Holder)  { (*Event)(e).hold() }
func (e *recordedEvent) LetGo(gpu.Holder) { (*Event)(e).letGo() }

// Prepare does nothing before a launch.
func (e *recordedEvent) Prepare(gpu.HasStream) error { return nil }

// Launched notes that a launch has recorded the event.
func (e *recordedEvent) Launched(gpu.HasStream) { e.recorded.Store(true) }

var _ gpu.Preparer = (*recordedEvent)(nil)
