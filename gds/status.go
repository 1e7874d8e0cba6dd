package gds

import "sync/atomic"

// A Status says how the bytes of a file go.
type Status struct {
	Path   string
	Engine Engine // by which the most bytes went, or the next ones would go
	Cached EngineStatus
	Direct EngineStatus
	CuFile EngineStatus

	Continued int64 // calls of the system that moved less than asked for, and were continued
	Retried   int64 // calls of the system that were interrupted, and tried again
}

// An EngineStatus is what an engine has done for a file.
type EngineStatus struct {
	Reads, Writes           int64 // calls of the system
	BytesRead, BytesWritten int64
	Reason                  error // why the engine does not serve the file; nil if it could
}

// Status tells what serves the file, what does not and why, and what was done so
// far. It may be called at any time, also after Close.
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

// counters are what has been done with a file.
type counters struct {
	by                 [engines]traffic
	continued, retried atomic.Int64
}

// traffic is that of one engine.
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
