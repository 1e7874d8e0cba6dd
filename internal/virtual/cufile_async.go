package virtual

import (
	"encoding/binary"
	"errors"
	"syscall"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
)

// transferPage is the size of which PageAlignedInputs promises multiples.
const transferPage = 4096

// allFixed is for transfers that are known when they are enqueued.
const allFixed = cufileapi.FixedFileSize | cufileapi.FixedFileOffset | cufileapi.FixedBufOffset

// A streamTransfer is a transfer in the order of a stream. Its words are looked up
// when the stream comes there, but for those that are fixed.
type streamTransfer struct {
	fileTransfer
	size, fileOffset, devOffset, done hostRange
	flags                             uint32
	room                              uint64 // bytes of memory that is not registered: the size at the submission
}

func (l *cufileLib) ReadAsync(h cufileapi.Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) cufileapi.Result {
	t := &streamTransfer{fileTransfer: fileTransfer{base: base}}
	return l.enqueue(cufileapi.FuncReadAsync, h, t, size, fileOffset, devOffset, done, s)
}

func (l *cufileLib) WriteAsync(h cufileapi.Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) cufileapi.Result {
	t := &streamTransfer{fileTransfer: fileTransfer{base: base, write: true}}
	return l.enqueue(cufileapi.FuncWriteAsync, h, t, size, fileOffset, devOffset, done, s)
}

func (l *cufileLib) enqueue(f cufileapi.Func, h cufileapi.Handle, t *streamTransfer,
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
	if r := l.prepare(f, dev, h, &t.fileTransfer); r != cufileapi.Success {
		l.stats.transferred(dev, &t.fileTransfer, 0, r, 0)
		return r
	}
	for word, p := range map[*hostRange]unsafe.Pointer{&t.size: unsafe.Pointer(size), &t.fileOffset: unsafe.Pointer(fileOffset),
		&t.devOffset: unsafe.Pointer(devOffset), &t.done: unsafe.Pointer(done)} {
		if *word, r = l.pinnedWord(p); r != cufileapi.Success {
			return r
		}
	}
	if r := t.fix(l); r != cufileapi.Success {
		return r
	}
	if x.hang {
		s.enqueue(f.Name(), func(*op) { forever(nil) })
	}
	t.use(1)
	s.push(&op{name: f.Name(), always: true, run: func(o *op) { l.run(o, t) }})
	if sh == 0 { // without a stream the call is synchronous
		k := s.mark()
		l.leave()
		status := l.m.await(dev, k)
		l.m.mu.Lock()
		if status != cudadrv.Success {
			return cufileapi.CUDAFailed(status)
		}
	}
	return cufileapi.Success
}

// stream returns the stream of the device, unless it is captured. m.mu is held.
func (l *cufileLib) stream(dev *device, h cudadrv.Stream) (*stream, cufileapi.Result) {
	s, r := l.m.stream(dev, h)
	switch {
	case r != cudadrv.Success:
		return nil, cufileapi.CUDAFailed(r)
	case s.dev != dev:
		return nil, cufileapi.CUDAContextMismatch
	case s.capture != nil:
		return nil, cufileapi.CUDAFailed(s.refused())
	}
	return s, cufileapi.Success
}

// pinnedWord finds a word that is kept after the call: nothing but page-locked
// memory stays where it is. m.mu is held.
func (l *cufileLib) pinnedWord(p unsafe.Pointer) (hostRange, cufileapi.Result) {
	if p == nil {
		return hostRange{}, cufileapi.InvalidValue
	}
	w, r := l.m.hostRange(p, 8)
	if r != cudadrv.Success || w.block == nil {
		return w, cufileapi.CUDAMemoryTypeInvalid
	}
	return w, cufileapi.Success
}

// value is the word now. m.mu is held.
func (h hostRange) value() int64 {
	return int64(binary.NativeEndian.Uint64(h.block.bytes(h.offset, h.n)))
}

// fix reads what is known at the submission. m.mu is held.
func (t *streamTransfer) fix(l *cufileLib) cufileapi.Result {
	t.room = uint64(t.size.value())
	if t.flags&cufileapi.FixedFileSize != 0 {
		t.fileTransfer.size = uint64(t.size.value())
	}
	if t.flags&cufileapi.FixedFileOffset != 0 {
		t.fileTransfer.fileOffset = t.fileOffset.value()
	}
	if t.flags&cufileapi.FixedBufOffset != 0 {
		t.fileTransfer.devOffset = t.devOffset.value()
	}
	if t.flags&allFixed == allFixed {
		return t.valid(l)
	}
	return cufileapi.Success
}

func (t *streamTransfer) valid(l *cufileLib) cufileapi.Result {
	x := &t.fileTransfer
	if t.flags&cufileapi.PageAlignedInputs != 0 && (x.size|uint64(x.fileOffset)|uint64(x.devOffset))%transferPage != 0 {
		return cufileapi.InvalidValue
	}
	return l.check(x)
}

// run carries the transfer out when the stream has come to it.
func (l *cufileLib) run(o *op, t *streamTransfer) {
	m := l.m
	m.mu.Lock()
	lost := o.s.dev.status != cudadrv.Success
	r, trouble := cufileapi.Success, (*trouble)(nil)
	if !lost {
		if r, trouble = t.look(o, l); r != cufileapi.Success {
			l.stats.transferred(o.s.dev, &t.fileTransfer, 0, r, 0)
		}
	}
	m.mu.Unlock()
	if trouble != nil {
		o.fail(trouble)
	}
	if !lost && trouble == nil {
		if r == cufileapi.Success {
			n, err := l.move(o, &t.fileTransfer)
			t.tell(o, n, err)
		} else {
			t.tell(o, 0, r)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	t.use(-1)
}

// look reads the words that are not fixed. m.mu is held.
func (t *streamTransfer) look(o *op, l *cufileLib) (cufileapi.Result, *trouble) {
	for _, w := range []struct {
		word  hostRange
		fixed uint32
		set   func(int64)
	}{
		{t.size, cufileapi.FixedFileSize, func(v int64) { t.fileTransfer.size = uint64(v) }},
		{t.fileOffset, cufileapi.FixedFileOffset, func(v int64) { t.fileTransfer.fileOffset = v }},
		{t.devOffset, cufileapi.FixedBufOffset, func(v int64) { t.fileTransfer.devOffset = v }},
	} {
		if t.flags&w.fixed != 0 {
			continue
		}
		b, trouble := w.word.touch(o, false)
		if trouble != nil {
			return cufileapi.Success, trouble
		}
		w.set(int64(binary.NativeEndian.Uint64(b)))
	}
	if r := t.valid(l); r != cufileapi.Success {
		return r, nil
	}
	if t.buffer == nil && uint64(t.fileTransfer.devOffset)+t.fileTransfer.size > t.room {
		return cufileapi.Result(syscall.EIO), nil
	}
	return cufileapi.Success, nil
}

// tell writes what became of the transfer: how many bytes, -1 where a system call
// failed, or minus cuFile's code.
func (t *streamTransfer) tell(o *op, n int64, err error) {
	var code cufileapi.Result
	switch {
	case err == nil:
	case errors.As(err, &code):
		n = -int64(code.Code())
	default:
		n = -1
	}
	m := o.s.dev.m
	m.mu.Lock()
	b, trouble := t.done.touch(o, true)
	if trouble == nil {
		binary.NativeEndian.PutUint64(b, uint64(n))
	}
	m.mu.Unlock()
	if trouble != nil {
		o.fail(trouble)
	}
}

func (l *cufileLib) StreamRegister(sh cudadrv.Stream, flags uint32) cufileapi.Result {
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

func (l *cufileLib) StreamDeregister(sh cudadrv.Stream) cufileapi.Result {
	return l.registerStream(cufileapi.FuncStreamDeregister, sh, func() bool {
		_, found := l.streams[sh]
		delete(l.streams, sh)
		return found
	})
}

// registerStream makes a change for a stream and waits for the stream.
func (l *cufileLib) registerStream(f cufileapi.Func, sh cudadrv.Stream, change func() bool) cufileapi.Result {
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
	k := s.mark()
	l.leave()
	if status := l.m.await(dev, k); status != cudadrv.Success {
		return cufileapi.CUDAFailed(status)
	}
	return cufileapi.Success
}
