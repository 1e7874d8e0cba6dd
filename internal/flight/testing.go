package flight

import "time"

// The functions of this file are for the tests of packages that record operations.

// Unwatched prevents Schedule from asking for a watchdog, and sets the timeout.
func (r *Recorder) Unwatched(timeout time.Duration) {
	r.watched = true
	r.SetTimeout(timeout)
}

// Resize replaces the ring by an empty one.
func (r *Recorder) Resize(entries int) { r.ring = make([]Entry, entries) }

// Age makes an operation older.
func (r *Recorder) Age(record uint64, by time.Duration) { r.find(record).Begun -= int64(by) }

// LastQuery returns the time of the last query, after moving it into the past by the given
// duration.
func (r *Recorder) LastQuery(by time.Duration) int64 {
	return r.lastQuery.Add(-int64(by))
}

// Age makes the marks older.
func (m *Marks) Age(by time.Duration) {
	for i := range m.list {
		m.list[i].At -= int64(by)
	}
}
