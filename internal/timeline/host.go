package timeline

import "syscall"

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

// Push begins a range of the calling thread.
func (r *Recorder) Push(name string) (depth int) {
	tid, x := syscall.Gettid(), Record{Kind: Range, Name: name, Device: NoDevice, Begin: r.Now()}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pushed[tid] = append(r.pushed[tid], x)
	return len(r.pushed[tid]) - 1
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
	r.pushed[tid] = list[:len(list)-1]
	x.End = now
	r.add(x)
	return len(list) - 1
}
