package launch

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/internal/safefile"
)

const (
	maxLine    = 64 << 10 // longer lines are split
	tailWidth  = 400      // bytes kept of each line of a worker's stderr
	keptLines  = 500      // lines kept of a worker's stderr, to find the start of a panic
	lastLines  = 10       // lines repeated in the summary
	panicLines = 12       // lines of a panic repeated in the summary
)

// An output writes the output of the workers in whole lines with the rank at the
// start. If the reader of the output is slow, the workers block, as they would
// without a launcher.
type output struct {
	prefix bool
	raw    bool             // lines are written byte for byte
	dir    *safefile.Folder // for log files, or nil
	warn   func(string)
	wg     sync.WaitGroup

	out, err *sink
	lost     atomic.Bool // some output could not be written

	mu     sync.Mutex
	writer *child // that wrote last, to set tail.buried
	tails  map[*child]*tail
}

// A sink is a destination of output. After a write error, for example because the
// reader exited, it discards output, so that the workers can continue.
type sink struct {
	w    io.Writer
	fail func(error) // called with the error, except if the reader exited
	mu   sync.Mutex  // held while a line is written, which blocks on a slow reader
	gone bool
}

func (s *sink) write(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	_, err := s.w.Write(b)
	s.gone = err != nil
	if s.gone && !errors.Is(err, syscall.EPIPE) {
		s.fail(err)
	}
}

// oneAtATime makes the workers' output and the launcher's messages take turns at Stderr. A file
// needs no turns.
func (cfg *Config) oneAtATime() {
	if _, file := cfg.Stderr.(*os.File); file || cfg.Stderr == nil {
		return
	}
	turns := &turnWriter{w: cfg.Stderr}
	if cfg.Stdout == cfg.Stderr {
		cfg.Stdout = turns
	}
	cfg.Stderr = turns
}

// A turnWriter can be used by several goroutines.
type turnWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (t *turnWriter) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.w.Write(b)
}

// A tail is the end of a worker's stderr.
type tail struct {
	lines  []string
	buried bool // another worker has written since
}

func newOutput(cfg *Config, job string, warn func(string)) (*output, error) {
	o := &output{prefix: !cfg.NoPrefix, raw: cfg.Raw, warn: warn, tails: map[*child]*tail{}}
	fail := func(err error) {
		o.lost.Store(true)
		warn(fmt.Sprintf("stopped writing the output of the ranks: %v", err))
	}
	o.out = &sink{w: cfg.Stdout, fail: fail}
	if o.err = o.out; !sameFile(cfg.Stdout, cfg.Stderr) {
		o.err = &sink{w: cfg.Stderr, fail: fail}
	}
	if cfg.LogDir == "" {
		return o, nil
	}
	dir, err := safefile.OutputFolder(filepath.Join(cfg.LogDir, filepath.Base(filepath.Clean("/"+job))))
	if err != nil {
		return nil, fmt.Errorf("make the log directory: %w", err)
	}
	o.dir = dir
	return o, nil
}

// sameFile reports whether two writers write to the same file, so that their lines must not mix.
func sameFile(a, b io.Writer) bool {
	x, ok1 := a.(*os.File)
	y, ok2 := b.(*os.File)
	if !ok1 || !ok2 {
		return a == b
	}
	s, err1 := x.Stat()
	t, err2 := y.Stat()
	return err1 == nil && err2 == nil && os.SameFile(s, t)
}

// A stream is one of a worker's two outputs.
type stream struct {
	from   *child
	to     *sink
	stderr bool
	log    *os.File // or nil
}

// pipe returns the write end of a pipe for the worker, and the read end, which is
// copied until all processes that have the write end exit.
func (o *output) pipe(c *child, stderr bool) (worker, mine *os.File, err error) {
	s := &stream{from: c, to: o.out, stderr: stderr}
	ext := ".out"
	if stderr {
		s.to, ext = o.err, ".err"
	}
	if o.dir != nil {
		if s.log, err = o.dir.Create(c.logName() + ext); err != nil {
			return nil, nil, fmt.Errorf("open a log file: %w", err)
		}
	}
	mine, worker, err = os.Pipe()
	if err != nil {
		if s.log != nil {
			s.log.Close()
		}
		return nil, nil, fmt.Errorf("open a pipe for rank %d: %w", c.rank, err)
	}
	o.wg.Go(func() {
		defer mine.Close()
		o.copy(s, mine)
	})
	return worker, mine, nil
}

// copy writes lines until the pipe closes, and terminates an incomplete last line.
func (o *output) copy(s *stream, r io.Reader) {
	<-s.from.known
	if s.log != nil {
		defer s.log.Close()
	}
	br := bufio.NewReaderSize(r, maxLine)
	buf := make([]byte, 0, 4096)
	for {
		line, err := br.ReadSlice('\n')
		if len(line) > 0 {
			o.keep(s, line)
			buf = o.lines(buf[:0], s, line)
			o.write(s, buf, line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// lines appends the printed form of a line. A carriage return starts a new line,
// so that a worker cannot overwrite the prefix. Other control characters are
// quoted.
func (o *output) lines(buf []byte, s *stream, line []byte) []byte {
	head := ""
	if o.prefix {
		head = "[" + s.from.name() + "] "
	}
	if o.raw {
		buf = append(append(buf, head...), line...)
		if line[len(line)-1] != '\n' {
			buf = append(buf, '\n')
		}
		return buf
	}
	text := strings.TrimRight(string(line), "\r\n")
	for part := range strings.SplitSeq(text, "\r") {
		if part != "" || text == "" {
			buf = append(append(append(buf, head...), plain.Lines(part)...), '\n')
		}
	}
	return buf
}

// keep writes to the log file, byte for byte. It reports only the first failure.
func (o *output) keep(s *stream, line []byte) {
	if s.log == nil {
		return
	}
	if _, err := s.log.Write(line); err != nil {
		o.warn(fmt.Sprintf("stopped writing the log of %s: %v", s.from.name(), err))
		s.log.Close()
		s.log = nil
	}
}

func (o *output) write(s *stream, text, line []byte) {
	o.wrote(s, line)
	s.to.write(text)
}

// wrote records a line before it is written.
func (o *output) wrote(s *stream, line []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.writer != s.from {
		if t := o.tails[o.writer]; t != nil {
			t.buried = true
		}
		o.writer = s.from
	}
	if s.stderr {
		t := o.tails[s.from]
		if t == nil {
			t = &tail{}
			o.tails[s.from] = t
		}
		t.add(line)
	}
}

func (t *tail) add(line []byte) {
	text := string(line[:min(len(line), tailWidth)])
	text = plain.Text(strings.TrimRight(text, "\r\n"))
	if len(t.lines) == keptLines {
		t.lines = t.lines[1:]
	}
	t.lines = append(t.lines, text)
	t.buried = false
}

// last returns the last lines of the tail, or the start of the last panic in it.
func (t *tail) last() []string {
	for i, l := range slices.Backward(t.lines) {
		if strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") {
			return t.lines[i:min(len(t.lines), i+panicLines)]
		}
	}
	return t.lines[max(0, len(t.lines)-lastLines):]
}

// buried returns the last lines of a worker's stderr if another one wrote after them.
func (o *output) buried(c *child) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.tails[c]; t != nil && t.buried {
		return t.last()
	}
	return nil
}
