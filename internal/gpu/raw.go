package gpu

import "github.com/gochorus/chorus/internal/cudadrv"

// The methods below are the driver's calls for raw streams and events.

// NewStream makes a stream that does not synchronize with the legacy default stream.
func (d *Device) NewStream(priority int32) (s cudadrv.Stream, err error) {
	err = d.DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		s, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, priority)
		return r
	})
	if err == nil {
		d.streams.add(s)
	}
	return s, err
}

// DestroyStream destroys a stream. Operations that are enqueued on it still run.
func (d *Device) DestroyStream(s cudadrv.Stream) error {
	d.streams.remove(s)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamDestroy(s) })
}

// SyncStream waits until everything enqueued on a stream so far has completed.
func (d *Device) SyncStream(s cudadrv.Stream) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s) })
}

// WaitEvent makes operations that are enqueued on a stream from now on wait for the latest
// record of the event.
func (d *Device) WaitEvent(s cudadrv.Stream, e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s, e, 0) })
}

// NewEvent makes an event.
func (d *Device) NewEvent(flags uint32) (e cudadrv.Event, err error) {
	err = d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		e, r = drv.EventCreate(flags)
		return r
	})
	return e, err
}

// DestroyEvent destroys an event. Waits that were enqueued for it stay valid.
func (d *Device) DestroyEvent(e cudadrv.Event) error {
	marksOf(d.sys).destroyed(e)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
}

// RecordEvent records the event on a stream.
func (d *Device) RecordEvent(e cudadrv.Event, s cudadrv.Stream) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e, s) })
}

// RecordExternal records the event in a capture: each launch of the graph records it.
func (d *Device) RecordExternal(e cudadrv.Event, s cudadrv.Stream) error {
	d.RecordedElsewhere(e)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecordWithFlags(e, s, cudadrv.EventExternal) })
}

// RecordedElsewhere notes that a graph or another process records an event, too, so that a timeline
// does not know its time.
func (d *Device) RecordedElsewhere(e cudadrv.Event) { marksOf(d.sys).exclude(e) }

// WaitExternal makes a captured stream wait for the event: each launch of the graph waits for the
// latest record at that time.
func (d *Device) WaitExternal(s cudadrv.Stream, e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s, e, cudadrv.EventExternal) })
}

// QueryEvent reports, without waiting, whether the stream has passed the event.
func (d *Device) QueryEvent(e cudadrv.Event) (bool, error) {
	return d.Ready(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(e) })
}

// SyncEvent waits until the stream has passed the event.
func (d *Device) SyncEvent(e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(e) })
}

// Capturing reports whether a stream is being captured into a graph.
func (d *Device) Capturing(s cudadrv.Stream) (bool, error) {
	status := cudadrv.CaptureNone
	err := d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(s)
		return r
	})
	return status != cudadrv.CaptureNone, err
}

// Ready makes a driver call that queries progress. For CUDA_ERROR_NOT_READY it returns
// false and a nil error.
func (d *Device) Ready(query Call) (bool, error) { return d.ready(query, false) }

// ReadyBeside is Ready by DoBeside.
func (d *Device) ReadyBeside(query Call) (bool, error) { return d.ready(query, AnyCapture()) }

// ReadyRelaxed is Ready by DoRelaxed.
func (d *Device) ReadyRelaxed(query Call) (bool, error) { return d.ready(query, true) }

func (d *Device) ready(query Call, relaxed bool) (done bool, err error) {
	call := func(drv cudadrv.Driver) cudadrv.Result {
		r := query(drv)
		done = r == cudadrv.Success
		if r == cudadrv.ErrorNotReady {
			return cudadrv.Success
		}
		return r
	}
	if relaxed {
		err = d.DoRelaxed(call)
	} else {
		err = d.Do(call)
	}
	return done && err == nil, err
}
