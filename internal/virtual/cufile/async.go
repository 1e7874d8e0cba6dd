package cufile

import (
	"encoding/binary"
	"errors"
	"syscall"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/fault"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// transferPage is the unit of PageAlignedInputs.
const transferPage = 4096

// allFixed is set for transfers whose parameters are all known at submission.
const allFixed = cufileapi.FixedFileSize | cufileapi.FixedFileOffset | cufileapi.FixedBufOffset

// A streamTransfer is a transfer in stream order. Parameters that are not fixed
// are read when the stream reaches it.
type streamTransfer struct {
	transfer
	size, fileOffset, devOffset, done machine.HostRange
	flags                             uint32
	room                              uint64 // length of unregistered memory: the size at submission
}

func (l *lib) ReadAsync(h cufileapi.Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) cufileapi.Result {
	t := &streamTransfer{transfer: transfer{base: base}}
	return l.enqueue(cufileapi.FuncReadAsync, h, t, size, fileOffset, devOffset, done, s)
}

func (l *lib) WriteAsync(h cufileapi.Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) cufileapi.Result {
	t := &streamTransfer{transfer: transfer{base: base, write: true}}
	return l.enqueue(cufileapi.FuncWriteAsync, h, t, size, fileOffset, devOffset, done, s)
}

func (l *lib) enqueue(f cufileapi.Func, h cufileapi.Handle, t *streamTransfer,
	size *uintptr, fileOffset, devOffset, done *int64, sh cudadrv.Stream) cufileapi.Result {
	dev, x, r := l.begin(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	s, r := l.stream(dev, sh)
	if r != cufileapi.Success {
		return r
	}
	if !l.running.streams() {
		return cufileapi.AsyncNotSupported
	}
	t.plan, t.flags = x, l.streams[sh]
	if r := l.prepare(f, dev, h, &t.transfer); r != cufileapi.Success {
		l.stats.transferred(dev, &t.transfer, 0, r, 0)
		return r
	}
	if r := t.words(l, size, fileOffset, devOffset, done); r != cufileapi.Success {
		return r
	}
	if x.Hang {
		s.Enqueue(f.Name(), func(*machine.Op) { fault.Forever(nil) })
	}
	t.use(1)
	s.EnqueueAlways(f.Name(), func(o *machine.Op) { l.run(o, t) })
	if sh == 0 { // without a stream the call is synchronous
		k := s.Mark()
		l.leave()
		status := l.m.Await(dev, k)
		l.m.Lock()
		if status != cudadrv.Success {
			return cufileapi.CUDAFailed(status)
		}
	}
	return cufileapi.Success
}

// words finds the pinned memory of the arguments that the stream reads and writes, and
// reads the ones that are fixed at submission.
func (t *streamTransfer) words(l *lib, size *uintptr, fileOffset, devOffset, done *int64) (r cufileapi.Result) {
	for word, p := range map[*machine.HostRange]unsafe.Pointer{&t.size: unsafe.Pointer(size), &t.fileOffset: unsafe.Pointer(fileOffset),
		&t.devOffset: unsafe.Pointer(devOffset), &t.done: unsafe.Pointer(done)} {
		if *word, r = l.pinnedWord(p); r != cufileapi.Success {
			return r
		}
	}
	return t.fix(l)
}

// stream returns a stream of the device, unless it is being captured. The machine is locked.
func (l *lib) stream(dev *machine.Device, h cudadrv.Stream) (*machine.Stream, cufileapi.Result) {
	s, r := l.m.Stream(dev, h)
	switch {
	case r != cudadrv.Success:
		return nil, cufileapi.CUDAFailed(r)
	case s.Device() != dev:
		return nil, cufileapi.CUDAContextMismatch
	case s.Capturing():
		return nil, cufileapi.CUDAFailed(s.Refused())
	}
	return s, cufileapi.Success
}

// pinnedWord resolves a word that is used after the call. It must be in
// page-locked memory, because other memory may move. The machine is locked.
func (l *lib) pinnedWord(p unsafe.Pointer) (machine.HostRange, cufileapi.Result) {
	if p == nil {
		return machine.HostRange{}, cufileapi.InvalidValue
	}
	w, r := l.m.HostRange(p, 8)
	if r != cudadrv.Success || !w.Pinned() {
		return w, cufileapi.CUDAMemoryTypeInvalid
	}
	return w, cufileapi.Success
}

// value reads the word. The machine is locked.
func value(w machine.HostRange) int64 { return int64(binary.NativeEndian.Uint64(w.Bytes())) }

// fix reads the fixed parameters at submission. The machine is locked.
func (t *streamTransfer) fix(l *lib) cufileapi.Result {
	t.room = uint64(value(t.size))
	if t.flags&cufileapi.FixedFileSize != 0 {
		t.transfer.size = uint64(value(t.size))
	}
	if t.flags&cufileapi.FixedFileOffset != 0 {
		t.transfer.fileOffset = value(t.fileOffset)
	}
	if t.flags&cufileapi.FixedBufOffset != 0 {
		t.transfer.devOffset = value(t.devOffset)
	}
	if t.flags&allFixed == allFixed {
		return t.valid(l)
	}
	return cufileapi.Success
}

func (t *streamTransfer) valid(l *lib) cufileapi.Result {
	x := &t.transfer
	if t.flags&cufileapi.PageAlignedInputs != 0 && (x.size|uint64(x.fileOffset)|uint64(x.devOffset))%transferPage != 0 {
		return cufileapi.InvalidValue
	}
	return l.check(x)
}

// run performs the transfer when the stream reaches it.
func (l *lib) run(o *machine.Op, t *streamTransfer) {
	m := l.m
	m.Lock()
	lost := o.Device().Status() != cudadrv.Success
	r, trouble := cufileapi.Success, (*machine.Trouble)(nil)
	if !lost {
		if r, trouble = t.look(o, l); r != cufileapi.Success {
			l.stats.transferred(o.Device(), &t.transfer, 0, r, 0)
		}
	}
	m.Unlock()
	if trouble != nil {
		o.Fail(trouble)
	}
	if !lost && trouble == nil {
		if r == cufileapi.Success {
			n, err := l.move(o, &t.transfer)
			t.tell(o, n, err)
		} else {
			t.tell(o, 0, r)
		}
	}
	m.Lock()
	defer m.Unlock()
	t.use(-1)
}

// look reads the parameters that are not fixed. The machine is locked.
func (t *streamTransfer) look(o *machine.Op, l *lib) (cufileapi.Result, *machine.Trouble) {
	for _, w := range []struct {
		word  machine.HostRange
		fixed uint32
		set   func(int64)
	}{
		{t.size, cufileapi.FixedFileSize, func(v int64) { t.transfer.size = uint64(v) }},
		{t.fileOffset, cufileapi.FixedFileOffset, func(v int64) { t.transfer.fileOffset = v }},
		{t.devOffset, cufileapi.FixedBufOffset, func(v int64) { t.transfer.devOffset = v }},
	} {
		if t.flags&w.fixed != 0 {
			continue
		}
		b, trouble := w.word.Touch(o, false)
		if trouble != nil {
			return cufileapi.Success, trouble
		}
		w.set(int64(binary.NativeEndian.Uint64(b)))
	}
	if r := t.valid(l); r != cufileapi.Success {
		return r, nil
	}
	if t.buffer == nil && uint64(t.transfer.devOffset)+t.transfer.size > t.room {
		return cufileapi.Result(syscall.EIO), nil
	}
	return cufileapi.Success, nil
}

// tell writes the result of the transfer: the number of bytes, -1 if a system
// call failed, or the negative code of cuFile.
func (t *streamTransfer) tell(o *machine.Op, n int64, err error) {
	var code cufileapi.Result
	switch {
	case err == nil:
	case errors.As(err, &code):
		n = -int64(code.Code())
	default:
		n = -1
	}
	m := o.Machine()
	m.Lock()
	b, trouble := t.done.Touch(o, true)
	if trouble == nil {
		binary.NativeEndian.PutUint64(b, uint64(n))
	}
	m.Unlock()
	if trouble != nil {
		o.Fail(trouble)
	}
}

func (l *lib) StreamRegister(sh cudadrv.Stream, flags uint32) cufileapi.Result {
	const known = allFixed | cufileapi.PageAlignedInputs
	return l.registerStream(cufileapi.FuncStreamRegister, sh, func() bool {
		_, twice := l.streams[sh]
		if twice || flags&^known != 0 {
			return false
		}
		l.streams[sh] = flags
		return true
	})
}

func (l *lib) StreamDeregister(sh cudadrv.Stream) cufileapi.Result {
	return l.registerStream(cufileapi.FuncStreamDeregister, sh, func() bool {
		_, found := l.streams[sh]
		delete(l.streams, sh)
		return found
	})
}

// registerStream changes the registration of a stream and waits for the stream.
func (l *lib) registerStream(f cufileapi.Func, sh cudadrv.Stream, change func() bool) cufileapi.Result {
	dev, _, r := l.begin(f)
	if r != cufileapi.Success {
		return r
	}
	s, r := l.stream(dev, sh)
	if r == cufileapi.Success && !change() {
		r = cufileapi.InvalidValue
	}
	if r != cufileapi.Success {
		l.leave()
		return r
	}
	k := s.Mark()
	l.leave()
	if status := l.m.Await(dev, k); status != cudadrv.Success {
		return cufileapi.CUDAFailed(status)
	}
	return cufileapi.Success
}
