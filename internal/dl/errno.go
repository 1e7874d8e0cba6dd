package dl

import (
	"runtime"
	"syscall"
)

// CallErrno calls a function that returns a word and sets errno on failure. The Errno is 0
// if the function did not set errno. A missing function returns ENOSYS, as a missing
// system call does. The frame is returned to the pool.
func (t *Table[N, R]) CallErrno(n N, f *Frame) (uintptr, syscall.Errno) {
	if !t.Has(n) {
		f.Put()
		return ^uintptr(0), syscall.ENOSYS
	}
	// errno belongs to the thread.
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

// errnoOfThread returns the address of the calling thread's errno, or nil if it is
// unknown.
func errnoOfThread() *int32 {
	fn := errnoLocation()
	if fn == 0 {
		return nil
	}
	return (*int32)(Pointer(uint64(Get().do(fn))))
}
