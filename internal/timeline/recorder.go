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
	"github.com/gochorus/chorus/internal/safefile"
)

const (
	maxWaiting = 1 << 16 // records that wait for the writer
	interval   = 100 * time.Millisecond
	maxBytes   = 1 << 30 // of a file
	drainTime  = 5 * time.Second
	fileFormat = 1
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
	sources []func()

	observer func(*Record) // of collectives; nil if there is none

	outstanding int // tickets that have not ended

	writing sync.Mutex // held by the goroutine that writes
	file    *os.File   // nil until the first record
	buf     *bufio.Writer
	written int64
	err     error

	stop, stopped chan struct{}
	once          sync.Once
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
	_, err := Start(dir)
	return err
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

// AddSource adds a function that ends the tickets whose operations have completed. The recorder
// calls it from its own goroutine.
func (r *Recorder) AddSource(collect func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sources = append(r.sources, collect)
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
	for _, collect := range sources {
		collect()
	}
}

// Flush writes the records that are complete. The end of a communicator calls it, because a
// process may end without another chance.
func (r *Recorder) Flush() {
	r.collect()
	r.write()
}

// Close ends the recording and writes the file. It waits some seconds for operations that have
// not completed.
func (r *Recorder) Close() error {
	r.once.Do(func() {
		current.CompareAndSwap(r, nil)
		close(r.stop)
		<-r.stopped
		r.collect()
		for end := time.Now().Add(drainTime); r.unfinished() && time.Now().Before(end); r.collect() {
			time.Sleep(time.Millisecond)
		}
		r.write()
		r.writing.Lock()
		defer r.writing.Unlock()
		if r.file != nil {
			r.err = errors.Join(r.err, r.file.Close())
		}
	})
	r.writing.Lock()
	defer r.writing.Unlock()
	return r.err
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
	if len(list) == 0 || r.err != nil {
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
			r.dropped.Add(uint64(len(list) - i))
			return fmt.Errorf("timeline: write: %s has %d bytes, which is the limit", r.file.Name(), r.written)
		}
		if err := r.writeLine(&list[i]); err != nil {
			return err
		}
	}
	return r.buf.Flush()
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
