package gds

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// readEngine chooses how the bytes from one offset to another are read.
func (f *File) readEngine(from, to int64) Engine {
	switch {
	case f.first == Cached || f.first == Auto && f.mem || !f.directReady():
		return Cached
	case f.first == Auto && f.resident(from, to):
		return Cached
	}
	return Direct
}

// writeEngine chooses how bytes are written: past the page cache, from which they
// would have to go to the disk anyway.
func (f *File) writeEngine() Engine {
	if f.first == Cached || f.first == Auto && f.mem || !f.directReady() {
		return Cached
	}
	return Direct
}

// resident reports whether half of the bytes or more are in the page cache. Where
// the system does not tell, Direct is refused.
func (f *File) resident(from, to int64) bool {
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.fd), &unix.CachestatRange{Off: uint64(from), Len: uint64(to - from)}, &st, 0); err != nil {
		f.refuse(Direct, fmt.Errorf("the system does not tell what is in its page cache: %w", os.NewSyscallError("cachestat", err)))
		return true
	}
	return st.Cache*uint64(os.Getpagesize())*2 >= uint64(to-from)
}

// refuse notes why an engine does not work for the file. The first reason stays.
func (f *File) refuse(e Engine, why error) { f.why[e].CompareAndSwap(nil, &why) }

func (f *File) refuses(e Engine) bool { return f.why[e].Load() != nil }
