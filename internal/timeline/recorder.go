// Package timeline records what the streams and the host did and when, and writes it to a file
// for each process. The virtual devices, package gpu, the flight recorder, the allocator and
// nvtx report to the recorder that is current. `chorus timeline` reads the files.
//
// A file has one JSON object a line: a header, and then records in any order. Times are
// nanoseconds since the origin in the header.
package timeline

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safe"
)

const (
	maxWaiting = 1 << 16 // records that wait for the writer
	interval   = 100 * time.Millisecond
	maxBytes   = 1 << 30 // of a file
	drainTime  = 5 * time.Second
	fileFormat = 1

	// A device or a disk may hang, so these limit how long a caller waits for both.
	flushTime = time.Second
	closeTime = drainTime + 10*time.Second
)

// current is the recorder that runs, or nil.
var current atomic.Pointer[Recorder]

// Current returns the recorder that runs, or nil, at the cost of one atomic
// load.
func Current() *Recorder { return current.Load() }

// A Recorder records the process. Its methods never wait for a device or a disk: a record
// without room is counted and dropped.
type Recorder struct {
	dir    string
	header Header
	origin time.Time

	order   atomic.Uint64
	dropped atomic.Uint64

	mu      sync.Mutex
	waiting []Record
	open    map[Stream]*scope
	pushed  map[int][]Record // ranges of RangePush, by thread
	sources []Source
	ended   bool // the sources are closed

	observer func(*Record) // of collectives; nil if there is none

	outstanding int // tickets that have not ended

	writing sync.Mutex // held by the goroutine that writes
	file    *os.File   // nil until the first record
	buf     *bufio.Writer
	written int64
	err     error
	closed  bool // nothing is written from now on

	stop, stopped chan struct{}
	once          sync.Once
	result        error // of Close
}

// A Source ends the tickets of a device.
type Source struct {
	Collect func() // ends the tickets whose operations have completed
	Close   func() // releases the resources after the last Collect
}

// Start installs a recorder as the current one, and fails if a recording is in
// progress. It writes a file to the directory, which it creates if necessary.
func Start(dir string) (*Recorder, error) {
	r, err := New(dir)
	if err != nil {
		return nil, err
	}
	if !current.CompareAndSwap(nil, r) {
		return nil, errors.Join(errors.New("timeline: start: a recording is in progress (it may be the one of "+env.Timeline.Name+"): close it first"), r.Close())
	}
	return r, nil
}

// New returns a recorder that is not current.
func New(dir string) (*Recorder, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("timeline: start: %w", err)
	}
	r := &Recorder{
		dir: dir, header: newHeader(), open: map[Stream]*scope{}, pushed: map[int][]Record{},
		stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	r.origin = time.Now()
	r.header.Wall, r.header.Monotonic = r.origin.UnixNano(), monotonic()
	go r.run()
	return r, nil
}

var startFromEnv = sync.OnceValue(func() error {
	dir := env.Timeline.Value()
	if dir == "" {
		return nil
	}
	if _, err := Start(dir); err != nil {
		return fmt.Errorf("%s=%s: %w", env.Timeline.Name, dir, err)
	}
	return nil
})

// StartFromEnv starts, at its first call, a recorder that lasts as long as the
// process, if the environment asks for it.
func StartFromEnv() error { return startFromEnv() }

func newHeader() Header {
	h := Header{Format: fileFormat, PID: os.Getpid(), Host: env.HostName.Value()}
	if h.Host == "" {
		h.Host, _ = os.Hostname() // the empty name is valid, too
	}
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		h.Boot = strings.TrimSpace(string(id))
	}
	if rank, err := env.Rank.Int(); err == nil {
		h.Rank = &rank
	}
	h.WorldSize, _ = env.WorldSize.Int()
	return h
}

// Now returns the time of a record.
func (r *Recorder) Now() int64 { return int64(time.Since(r.origin)) }

// At converts a time.
func (r *Recorder) At(t time.Time) int64 { return int64(t.Sub(r.origin)) }

// Add adds a record.
func (r *Recorder) Add(x Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(x)
}

// add is Add for callers that hold mu.
func (r *Recorder) add(x Record) {
	if len(r.waiting) == maxWaiting {
		r.dropped.Add(1)
		return
	}
	r.waiting = append(r.waiting, x)
}

// Drop counts a record that could not be made.
func (r *Recorder) Drop() { r.dropped.Add(1) }

// AddSource adds a source, which the recorder calls from its own goroutines. If
// the recording has ended, AddSource closes the source.
func (r *Recorder) AddSource(s Source) {
	r.mu.Lock()
	ended := r.ended
	if !ended {
		r.sources = append(r.sources, s)
	}
	r.mu.Unlock()
	if ended {
		s.Close()
	}
}

// Ended reports whether Close was called.
func (r *Recorder) Ended() bool {
	select {
	case <-r.stop:
		return true
	default:
		return false
	}
}

// SetObserver sets the function that gets the record of each collective, and
// which must not call the recorder.
func (r *Recorder) SetObserver(f func(*Record)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.observer = f
}

func (r *Recorder) run() {
	defer close(r.stopped)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.collect()
			r.write()
		case <-r.stop:
			return
		}
	}
}

// collect asks all sources.
func (r *Recorder) collect() {
	r.mu.Lock()
	sources := r.sources
	r.mu.Unlock()
	for range 2 { // an operation may begin after one of a later source
		for _, s := range sources {
			s.Collect()
		}
	}
}

// Flush writes the records that are complete. The end of a communicator calls it, because a
// process may end without another chance. If a device or the disk hangs, Flush returns after
// one second and the writing goes on.
func (r *Recorder) Flush() {
	poll.Within(flushTime, func() (none struct{}) {
		r.collect()
		r.write()
		return none
	})
}

// Close ends the recording and writes the file. It waits some seconds for operations that have
// not completed, and for a device or a disk that hangs.
func (r *Recorder) Close() error {
	r.once.Do(func() {
		current.CompareAndSwap(r, nil)
		close(r.stop)
		err, returned := poll.Within(closeTime, r.finish)
		if r.result = err; !returned {
			r.result = fmt.Errorf("timeline: close: a device or the disk of %s did not answer for %v: the file may be incomplete", r.dir, closeTime)
		}
	})
	return r.result
}

// finish is Close without its limit of time.
func (r *Recorder) finish() error {
	<-r.stopped
	r.collect()
	for end := time.Now().Add(drainTime); r.unfinished() && time.Now().Before(end); r.collect() {
		time.Sleep(time.Millisecond)
	}
	r.closeSources()
	r.write()
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.closed = true; r.file != nil {
		r.err = errors.Join(r.err, r.file.Close())
	}
	return r.err
}

func (r *Recorder) closeSources() {
	r.mu.Lock()
	sources := r.sources
	r.sources, r.ended = nil, true
	r.mu.Unlock()
	for _, s := range sources {
		s.Close()
	}
}

// write writes the waiting records.
func (r *Recorder) write() {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.mu.Lock()
	list := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	if n := r.dropped.Swap(0); n > 0 {
		list = append(list, Record{Kind: Dropped, Device: NoDevice, Begin: r.Now(), Count: n})
	}
	if len(list) == 0 || r.err != nil || r.closed {
		return
	}
	if r.err = r.writeList(list); r.err != nil {
		slog.Warn("the timeline of this process ends here", "error", r.err)
	}
}

func (r *Recorder) writeList(list []Record) error {
	if r.file == nil {
		if err := r.create(); err != nil {
			return err
		}
	}
	for i := range list {
		if r.written > maxBytes {
			return errors.Join(r.writeMissing(list[i:]), fmt.Errorf("timeline: write: %s has %d bytes, which is the limit", r.file.Name(), r.written))
		}
		if err := r.writeLine(&list[i]); err != nil {
			return err
		}
	}
	return r.buf.Flush()
}

// writeMissing writes how many records do not fit, as the last line of the file.
func (r *Recorder) writeMissing(list []Record) error {
	last := Record{Kind: Dropped, Device: NoDevice, Begin: r.Now()}
	for i := range list {
		if list[i].Kind == Dropped {
			last.Count += list[i].Count
		} else {
			last.Count++
		}
	}
	return errors.Join(r.writeLine(&last), r.buf.Flush())
}

func (r *Recorder) writeLine(x any) error {
	line, err := json.Marshal(x)
	if err != nil {
		return fmt.Errorf("timeline: write: %w", err)
	}
	n, err := r.buf.Write(append(line, '\n'))
	r.written += int64(n)
	return err
}

// create creates the file with its header, once there is something to record,
// so that a process that records nothing leaves no file.
func (r *Recorder) create() error {
	name := "timeline-"
	if r.header.Rank != nil {
		name += "rank" + strconv.Itoa(*r.header.Rank) + "-"
	}
	host := strings.Map(func(c rune) rune {
		if c == '/' || c < ' ' {
			return '_'
		}
		return c
	}, r.header.Host)
	name += host + "-" + strconv.Itoa(r.header.PID)
	for k := 1; ; k++ {
		path := filepath.Join(r.dir, name+".jsonl")
		if k > 1 {
			path = filepath.Join(r.dir, fmt.Sprintf("%s-%d.jsonl", name, k))
		}
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			continue // an earlier recording of the process
		}
		f, err := safe.Create(path)
		if err != nil {
			return fmt.Errorf("timeline: write: %w", err)
		}
		r.file, r.buf = f, bufio.NewWriter(f)
		return r.writeLine(&r.header)
	}
}

// Kinds of records.
const (
	Kernel     = "kernel"
	Copy       = "copy"
	Fill       = "fill"
	Collective = "collective" // a collective, a send or a receive, or several in one batch
	Graph      = "graph"      // a launch of a graph
	Callback   = "callback"   // a function of the host that a stream calls
	Wait       = "wait"       // the host waits for a device
	Driver     = "driver"     // the host is in a call that allocates or frees memory
	Range      = "range"      // of nvtx
	Instant    = "instant"    // a mark of nvtx
	Memory     = "memory"     // an event of the allocator
	Member     = "member"     // a rank of a communicator
	Dropped    = "dropped"    // how many records are missing
)

// NoDevice is the device of a record of the host.
const NoDevice = -1

// A Header is the first line of a file.
type Header struct {
	Format    int    `json:"timeline"` // 1
	Host      string `json:"host"`
	Boot      string `json:"boot_id"` // processes with the same one share a monotonic clock
	PID       int    `json:"pid"`
	Rank      *int   `json:"rank,omitempty"` // null if the environment does not tell it
	WorldSize int    `json:"world_size,omitempty"`
	Wall      int64  `json:"origin_wall_ns"`
	Monotonic int64  `json:"origin_monotonic_ns"`
}

// A Record is a line after the header.
type Record struct {
	Kind   string `json:"kind"`
	Name   string `json:"name,omitempty"`
	Begin  int64  `json:"begin_ns"`
	End    int64  `json:"end_ns,omitempty"`
	Device int    `json:"device"` // ordinal, or NoDevice
	Stream uint64 `json:"stream,omitempty"`
	Branch bool   `json:"branch,omitempty"` // a branch of a graph that was captured on the stream
	Order  uint64 `json:"order,omitempty"`  // of the call that enqueued it, among all of the process
	Parent uint64 `json:"parent,omitempty"` // order of the collective that it is a part of
	Bytes  uint64 `json:"bytes,omitempty"`
	Count  uint64 `json:"count,omitempty"` // of a Dropped record
	Ops    []Op   `json:"operations,omitempty"`

	Member *Membership `json:"member,omitempty"`
}

// An Op is an operation of a collective record.
type Op struct {
	Group    string `json:"group"` // the same on all ranks of the communicator
	Name     string `json:"name"`  // such as ncclAllReduce
	Sequence uint64 `json:"sequence"`
	Transfer bool   `json:"transfer,omitempty"` // a send or a receive
	Bytes    uint64 `json:"bytes"`
	Rank     int    `json:"rank"` // in the group
	Peer     int    `json:"peer"` // or the root; -1 means none
}

// A Membership describes a rank of a communicator.
type Membership struct {
	Group     string `json:"group"`
	Label     string `json:"label,omitempty"` // the name that the program gave
	Rank      int    `json:"rank"`
	Size      int    `json:"size"`
	World     []int  `json:"world_ranks,omitempty"` // by rank
	WorldSize int    `json:"world_size,omitempty"`
}

// A Stream names a stream of a process.
type Stream struct {
	Device int
	Handle uint64
	Branch bool
}

// A scope is a collective that is being enqueued on a stream. Everything that is enqueued on the
// stream meanwhile is a part of it, and its time is the time of its parts.
type scope struct {
	rec     Record
	pending int // parts that have not completed
	closed  bool
	ran     bool // a part has completed
	whole   *Ticket
}

// A Ticket is an operation that is enqueued and has not completed.
type Ticket struct {
	r      *Recorder
	rec    Record
	scope  *scope
	silent bool // only its scope is recorded
	ended  bool
}

// Enqueue announces an operation that is about to be enqueued on a stream.
func (r *Recorder) Enqueue(kind, name string, on Stream, bytes uint64) *Ticket {
	t := &Ticket{r: r, rec: Record{Kind: kind, Name: name, Device: on.Device, Stream: on.Handle, Branch: on.Branch, Bytes: bytes}}
	r.mu.Lock()
	defer r.mu.Unlock()
	t.rec.Order = r.order.Add(1)
	r.outstanding++
	r.join(t, on)
	return t
}

// join adds the ticket to the parts of the collective that is being enqueued. mu is held.
func (r *Recorder) join(t *Ticket, on Stream) {
	if t.scope = r.open[on]; t.scope != nil {
		t.scope.pending++
		t.rec.Parent = t.scope.rec.Order
		t.silent = t.silent || t.rec.Kind == Collective // the library's own name of the same operation
	}
}

// Done records that the operation ran from begin to end.
func (t *Ticket) Done(from, to time.Time) {
	begin, end := t.r.At(from), t.r.At(to)
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	if t.ended {
		return // its collective was refused
	}
	t.ended = true
	t.r.outstanding--
	if t.rec.Begin, t.rec.End = begin, max(begin, end); !t.silent {
		t.r.add(t.rec)
	}
	if s := t.scope; s != nil {
		if !s.ran {
			s.rec.Begin, s.rec.End, s.ran = begin, t.rec.End, true
		}
		s.rec.Begin, s.rec.End = min(s.rec.Begin, begin), max(s.rec.End, t.rec.End)
		t.r.leave(s)
	}
}

// Cancel forgets an operation that was refused, and does nothing on nil.
func (t *Ticket) Cancel() {
	if t == nil {
		return
	}
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	t.cancel()
}

// cancel is Cancel for callers that hold mu.
func (t *Ticket) cancel() {
	if t == nil || t.ended {
		return
	}
	t.ended = true
	t.r.outstanding--
	if t.scope != nil {
		t.r.leave(t.scope)
	}
}

// leave ends a part of a collective, and records the collective after its last part. mu is held.
func (r *Recorder) leave(s *scope) {
	if s.pending--; s.closed && s.pending == 0 && s.ran {
		r.add(s.rec)
		if r.observer != nil {
			r.observer(&s.rec)
		}
	}
}

// Open begins a collective on a stream, or adds an operation to the collective
// that is being enqueued there, as the operations of a batch do. It reports
// whether it began a collective.
func (r *Recorder) Open(on Stream, op Op) (began bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[on]
	if s == nil {
		s = &scope{rec: Record{Kind: Collective, Name: op.Name, Device: on.Device, Stream: on.Handle, Order: r.order.Add(1)}}
		r.open[on] = s
		began = true
	}
	s.rec.Ops = append(s.rec.Ops, op)
	s.rec.Bytes += op.Bytes
	return began
}

// Whole returns a ticket for the time of the collective that is being enqueued
// on a stream: of all its parts, even if the driver does not see them. If there
// is none, Whole returns nil.
func (r *Recorder) Whole(on Stream) *Ticket {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &Ticket{r: r, silent: true}
	if r.join(t, on); t.scope == nil {
		return nil
	}
	t.scope.whole = t
	r.outstanding++
	return t
}

// Shut ends the collective on a stream: all its parts are enqueued.
func (r *Recorder) Shut(on Stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.open[on]; s != nil {
		delete(r.open, on)
		s.closed = true
		s.pending++ // so that leave records it if no part is pending
		r.leave(s)
	}
}

// Refuse removes the latest operation of the collective on a stream, and the collective with its
// only operation.
func (r *Recorder) Refuse(on Stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[on]
	if s == nil {
		return
	}
	last := len(s.rec.Ops) - 1
	s.rec.Bytes -= s.rec.Ops[last].Bytes
	if s.rec.Ops = s.rec.Ops[:last]; last == 0 {
		r.remove(on)
	}
}

// Forget removes the open collectives of a group that has failed.
func (r *Recorder) Forget(group string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for on, s := range r.open {
		if s.rec.Ops[0].Group == group {
			r.remove(on)
		}
	}
}

// remove removes the open collective of a stream and the ticket for its time. mu is held.
func (r *Recorder) remove(on Stream) {
	s := r.open[on]
	delete(r.open, on)
	s.whole.cancel()
}

// unfinished reports whether an operation has not completed.
func (r *Recorder) unfinished() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outstanding > 0
}

// monotonic reads the clock that all processes of a host share, and that time.Time uses.
func monotonic() int64 {
	const clockMonotonic = 1
	var ts syscall.Timespec
	if _, _, e := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&ts)), 0); e != 0 {
		return time.Now().UnixNano()
	}
	return ts.Nano()
}

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

// Push begins a range of the calling thread, and forgets the outermost range if
// too many are open.
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
