package gds

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// The reasons that rule gives.
var (
	errInMemory   = errors.New("the file system keeps files in memory: the page cache has all their bytes")
	errNoNvidiaFS = errors.New("nvidia-fs is not loaded, so that cuFile would copy through host memory as the other engines do: CHORUS_GDS_ENGINE=cufile tries it")
)

// rule refuses the engines that are not used for the file.
func (f *File) rule() {
	asked := fmt.Errorf("engine %s was asked for", f.first)
	switch f.first {
	case Cached:
		f.refuse(Direct, asked)
		f.refuse(CuFile, asked)
	case Direct:
		f.refuse(CuFile, asked)
	case Auto:
		if f.mem {
			f.refuse(Direct, errInMemory)
			f.refuse(CuFile, errInMemory)
		} else if _, err := os.Stat("/proc/driver/nvidia-fs"); err != nil {
			f.refuse(CuFile, errNoNvidiaFS)
		}
	}
}

// readEngine chooses the engine for a range of bytes that cuFile does not read.
func (f *File) readEngine(from, to int64) Engine {
	if !f.directReady() || f.first == Auto && f.resident(from, to) {
		return Cached
	}
	return Direct
}

// writeEngine chooses the engine for writes that cuFile does not do. It prefers Direct,
// because bytes in the page cache would have to be written to the disk later.
func (f *File) writeEngine() Engine {
	if !f.directReady() {
		return Cached
	}
	return Direct
}

// resident reports whether at least half of the bytes are in the page cache. If the system
// does not report that, Direct is refused.
func (f *File) resident(from, to int64) bool {
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.fd), &unix.CachestatRange{Off: uint64(from), Len: uint64(to - from)}, &st, 0); err != nil {
		f.refuse(Direct, fmt.Errorf("the system does not report the pages in its page cache: %w", os.NewSyscallError("cachestat", err)))
		return true
	}
	return st.Cache*uint64(os.Getpagesize())*2 >= uint64(to-from)
}

// refuse records why an engine does not work for the file. The first reason is kept.
func (f *File) refuse(e Engine, why error) { f.why[e].CompareAndSwap(nil, &why) }

func (f *File) refuses(e Engine) bool { return f.why[e].Load() != nil }
