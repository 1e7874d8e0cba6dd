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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safefile"
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

// Current returns the recorder that runs, or nil. It costs one atomic load.
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

// Start makes a recorder the current one. It writes a file to the directory, which it makes
// if necessary.
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

// New makes a recorder that is not current.
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

// StartFromEnv starts a recorder that lasts as long as the process, if the environment asks for
// it. Only the first call does so.
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

// AddSource adds a source. The recorder calls it from its own goroutines.
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

// SetObserver sets the function that gets the record of each collective. It must not call the
// recorder.
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

// create makes the file with its header. A process that records nothing leaves no file.
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
		f, err := safefile.Create(path)
		if err != nil {
			return fmt.Errorf("timeline: write: %w", err)
		}
		r.file, r.buf = f, bufio.NewWriter(f)
		return r.writeLine(&r.header)
	}
}
