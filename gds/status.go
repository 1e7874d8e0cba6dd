package gds

import "sync/atomic"

// A Status describes the engines of a file.
type Status struct {
	Path   string
	Engine Engine // the engine of the most bytes so far, or else of the next bytes
	Cached EngineStatus
	Direct EngineStatus
	CuFile EngineStatus

	Continued int64 // system calls that moved fewer bytes than requested, and were continued
	Retried   int64 // system calls that were interrupted, and repeated
}

// An EngineStatus is the traffic of an engine for a file.
type EngineStatus struct {
	Reads, Writes           int64 // calls of the system
	BytesRead, BytesWritten int64
	Reason                  error // why the engine does not serve the file; nil if it could
}

// Status returns the state of the file's engines, why an engine is not used, and the
// traffic so far. It may be called at any time, also after Close.
func (f *File) Status() Status {
	s := Status{Path: f.path, Engine: f.prefers(),
		Cached: f.status(Cached), Direct: f.status(Direct), CuFile: f.status(CuFile),
		Continued: f.count.continued.Load(), Retried: f.count.retried.Load()}
	most := int64(0)
	for e := Cached; e < engines; e++ {
		t := &f.count.by[e]
		if n := t.bytesRead.Load() + t.bytesWritten.Load(); n > most {
			s.Engine, most = e, n
		}
	}
	return s
}

func (f *File) status(e Engine) EngineStatus {
	t := &f.count.by[e]
	x := EngineStatus{Reads: t.reads.Load(), Writes: t.writes.Load(),
		BytesRead: t.bytesRead.Load(), BytesWritten: t.bytesWritten.Load()}
	if why := f.why[e].Load(); why != nil {
		x.Reason = *why
	}
	return x
}

// prefers returns the engine that is tried first.
func (f *File) prefers() Engine {
	for _, e := range []Engine{CuFile, Direct} {
		if !f.refuses(e) {
			return e
		}
	}
	return Cached
}

// counters count the traffic of a file.
type counters struct {
	by                 [engines]traffic
	continued, retried atomic.Int64
}

// traffic counts the traffic of one engine.
type traffic struct{ reads, writes, bytesRead, bytesWritten atomic.Int64 }

func (t *traffic) add(write bool, bytes int64) {
	if write {
		t.writes.Add(1)
		t.bytesWritten.Add(bytes)
	} else {
		t.reads.Add(1)
		t.bytesRead.Add(bytes)
	}
}
