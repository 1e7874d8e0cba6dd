package timeline

import (
	"slices"
	"syscall"
)

// Host calls fn and records how long the host was in it.
func (r *Recorder) Host(kind, name string, device int, bytes uint64, fn func()) {
	x := Record{Kind: kind, Name: name, Device: device, Bytes: bytes, Begin: r.Now()}
	fn()
	x.End = r.Now()
	r.Add(x)
}

// A Span is a range that has begun. A nil Span records nothing.
type Span struct {
	r   *Recorder
	rec Record
}

// Start begins a range that any thread may end.
func (r *Recorder) Start(name string) *Span {
	return &Span{r, Record{Kind: Range, Name: name, Device: NoDevice, Begin: r.Now()}}
}

// End ends the range.
func (s *Span) End() {
	if s != nil {
		x := s.rec
		x.End = s.r.Now()
		s.r.Add(x)
	}
}

// maxDepth limits the open ranges of a thread. A goroutine that changes its thread leaves ranges
// that nothing ends.
const maxDepth = 256

// Push begins a range of the calling thread. It forgets the outermost range if too many are open.
func (r *Recorder) Push(name string) (depth int) {
	tid, x := syscall.Gettid(), Record{Kind: Range, Name: name, Device: NoDevice, Begin: r.Now()}
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.pushed[tid]
	if len(list) == maxDepth {
		list = slices.Delete(list, 0, 1)
		r.dropped.Add(1)
	}
	r.pushed[tid] = append(list, x)
	return len(list)
}

// Pop ends the range of the calling thread that began last.
func (r *Recorder) Pop() (depth int) {
	tid, now := syscall.Gettid(), r.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.pushed[tid]
	if len(list) == 0 {
		return -1 // it began before the recording
	}
	x := list[len(list)-1]
	if r.pushed[tid] = list[:len(list)-1]; len(list) == 1 {
		delete(r.pushed, tid)
	}
	x.End = now
	r.add(x)
	return len(list) - 1
}
