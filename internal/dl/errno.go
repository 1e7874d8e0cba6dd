package dl

import (
	"runtime"
	"syscall"
)

// CallErrno calls a function that returns a word and leaves the cause of a failure
// in errno, which is 0 where it left none. A missing function fails with ENOSYS, as
// a system call does. The frame is given back.
func (t *Table[N, R]) CallErrno(n N, f *Frame) (uintptr, syscall.Errno) {
	if !t.Has(n) {
		f.Put()
		return ^uintptr(0), syscall.ENOSYS
	}
	// errno is the thread's.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f.before, f.subject = t.before, t.subject
	errno := errnoOfThread()
	if errno == nil {
		return f.do(t.fns[n]), 0
	}
	*errno = 0
	r := f.do(t.fns[n])
	return r, syscall.Errno(*errno)
}

// errnoOfThread returns where C keeps the calling thread's errno, or nil where that
// is not known.
func errnoOfThread() *int32 {
	fn := errnoLocation()
	if fn == 0 {
		return nil
	}
	return (*int32)(Pointer(uint64(Get().do(fn))))
}
