package stream

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// An EventHandle identifies an interprocess event for other processes of the host
// (CUipcEventHandle). It is plain data that can be sent by any means.
type EventHandle [64]byte

// IPCHandle returns a handle that OpenEvent of another process opens (cuIpcGetEventHandle,
// torch.cuda.Event.ipc_handle). The event must be made with EventConfig.Interprocess.
func (e *Event) IPCHandle() (EventHandle, error) {
	const op = "stream: handle of an event"
	if err := e.check(op); err != nil {
		return EventHandle{}, err
	}
	if gpu.EventFlagsOf(e)&cudadrv.EventInterprocess == 0 || e.opened {
		return EventHandle{}, fmt.Errorf("%s on %s: the event must be made here, with EventConfig.Interprocess: %w",
			op, e.dev, device.ErrorInvalidHandle)
	}
	gpu.DeviceOf(e.dev).RecordedElsewhere(gpu.EventOf(e))
	var h cudadrv.IpcEventHandle
	err := gpu.DeviceOf(e.dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		h, r = drv.IpcGetEventHandle(gpu.EventOf(e))
		return r
	})
	return EventHandle(h), err
}

// OpenEvent opens an event of another process (cuIpcOpenEventHandle,
// torch.cuda.Event.from_ipc_handle). dev must be the GPU that the event was created
// on. Either process may record it and wait for it. The process that created the event
// must close it last.
//
// The process that created the event cannot open it. Virtual devices share events between
// two Systems of one process, which simulate two processes, and not between real
// processes: then the error matches device.ErrorNotSupported.
func OpenEvent(dev *device.Device, h EventHandle) (*Event, error) {
	const op = "stream: open event"
	if dev == nil {
		return nil, fmt.Errorf("%s: no device given", op)
	}
	const flags = cudadrv.EventInterprocess | cudadrv.EventDisableTiming
	e := &Event{dev: dev, opened: true}
	err := gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		raw, r := drv.IpcOpenEventHandle(cudadrv.IpcEventHandle(h))
		e.eventRef = gpu.NewEventRef(raw, flags)
		return r
	})
	if err != nil && gpu.DeviceOf(dev).System().Machine != nil && errors.Is(err, device.ErrorNotSupported) {
		err = fmt.Errorf("virtual devices share no events between processes: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	gpu.DeviceOf(dev).RecordedElsewhere(gpu.EventOf(e))
	handle.Init(e, &e.owner, handle.About{Kind: "event", On: dev, Frequent: true})
	return e, nil
}
