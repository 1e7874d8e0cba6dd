package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/gochorus/chorus/internal/safe"
)

const (
	maxLine    = 64 << 10              // longer lines are split
	maxEscape  = 256                   // bytes of an escape sequence that is kept whole
	flushAfter = 50 * time.Millisecond // for the rest of a line, before its beginning is written
	tailWidth  = 400                   // bytes kept of each line of a worker's stderr
	keptLines  = 500                   // lines kept of a worker's stderr, to find the start of a panic
	lastLines  = 10                    // lines repeated in the summary
	panicLines = 12                    // lines of a panic repeated in the summary
)

// An output writes the output of the workers with the rank at the start of each line. A carriage return
// ends a line, so that progress appears at once, and a worker cannot overwrite the prefix. A line without
// an end, such as a prompt, is written after flushAfter and goes on when the rest comes, unless another
// worker has written meanwhile. If the reader of the output is slow, the workers block, as they would
// without a launcher.
type output struct {
	prefix bool
	raw    bool            // lines are written byte for byte
	dir    *safe.Folder    // for log files, or nil
	logs   []*os.File      // all that were opened; locked until close
	named  map[string]bool // names of logs of this launcher
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
	mu   sync.Mutex  // held while output is written, which blocks on a slow reader
	gone bool
	open *stream // whose line has no end yet, or nil
}

// write calls text and writes its result. text gets whether the line of the stream is open, and returns
// whether it stays open.
func (s *sink) write(from *stream, text func(open bool) ([]byte, bool)) {
	s.mu.Lock()
	b, open := text(s.open == from)
	if s.open != nil && s.open != from && len(b) > 0 {
		b = slices.Insert(b, 0, '\n')
	}
	if len(b) > 0 {
		if s.open = nil; open {
			s.open = from
		}
	}
	err := s.put(b)
	s.mu.Unlock()
	if err != nil && !errors.Is(err, syscall.EPIPE) {
		s.fail(err) // writes a message, perhaps to this sink
	}
}

func (s *sink) put(b []byte) error {
	if s.gone || len(b) == 0 {
		return nil
	}
	_, err := s.w.Write(b)
	s.gone = err != nil
	return err
}

// endLine ends an open line, before something else is written to the destination.
func (s *sink) endLine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open != nil {
		s.open = nil
		_ = s.put([]byte{'\n'}) // the next write has the error, too
	}
}

// oneAtATime serializes the workers' output and the launcher's messages at
// Stderr, unless it is a file, which needs no turns.
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
	end    byte // of the last line: '\n', '\r' (the next text replaces it), or 0 (the next text continues it)
	buried bool // another worker has written since
}

func newOutput(cfg *Config, job string, warn func(string)) (*output, error) {
	o := &output{prefix: !cfg.NoPrefix, raw: cfg.Raw, warn: warn, tails: map[*child]*tail{}, named: map[string]bool{}}
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
	dir, err := safe.OutputFolder(filepath.Join(cfg.LogDir, fileName(job)))
	if err != nil {
		return nil, fmt.Errorf("make the log directory: %w", err)
	}
	o.dir = dir
	return o, nil
}

// fileName returns a name of a file for the name of a job or a host. Different names have different files, and none is a path.
func fileName(name string) string {
	switch name {
	case ".":
		return "%2E"
	case "..":
		return "%2E%2E"
	}
	return strings.NewReplacer("%", "%25", "/", "%2F").Replace(name)
}

// openLogs opens the log files of a worker, which must not be in use. It truncates none, so that a conflict about one worker
// leaves the files of all others as they are. Only the supervising goroutine calls it.
func (o *output) openLogs(c *child, host string) error {
	if o.dir == nil {
		return nil
	}
	name := c.logName(host)
	for k := 2; o.named[name]; k++ {
		name = fmt.Sprintf("%s.%d", c.logName(host), k)
	}
	o.named[name] = true
	for i, ext := range []string{".out", ".err"} {
		f, err := o.dir.CreateLocked(name + ext)
		if errors.Is(err, safe.ErrInUse) {
			err = fmt.Errorf("%w: another launcher of a job with this name and folder is running: choose another --job or --log-dir, or wait for its end", err)
		}
		if err != nil {
			return fmt.Errorf("open a log file: %w", err)
		}
		c.logs[i], o.logs = f, append(o.logs, f)
	}
	return nil
}

// close closes the log files when nothing writes to them any more. Until then, also the files of workers that have exited
// are in use.
func (o *output) close() {
	go func() {
		o.wg.Wait()
		for _, f := range o.logs {
			f.Close()
		}
	}()
	o.dir.Close()
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

	width   int  // of the beginning of a line that is written
	printed bool // something since the last '\n'
}

// pipe returns the write end of a pipe for the worker, and the read end, which is
// copied until all processes that have the write end exit.
func (o *output) pipe(c *child, stderr bool) (worker, mine *os.File, err error) {
	s := &stream{from: c, to: o.out, stderr: stderr, log: c.logs[0]}
	if stderr {
		s.to, s.log = o.err, c.logs[1]
	}
	if s.log != nil {
		if err := s.log.Truncate(0); err != nil {
			return nil, nil, fmt.Errorf("empty a log file: %w", err)
		}
	}
	mine, worker, err = os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("open a pipe for %s: %w", c.name(), err)
	}
	o.wg.Go(func() {
		defer mine.Close()
		o.copy(s, mine)
	})
	return worker, mine, nil
}

// copy writes what it reads until the pipe closes, and ends an incomplete last line.
func (o *output) copy(s *stream, r io.Reader) {
	<-s.from.known
	timed, _ := r.(interface{ SetReadDeadline(time.Time) error })
	buf, n := make([]byte, maxLine), 0 // buf[:n] is the beginning of a line
	held := false                      // it is the beginning of a sequence, too
	for {
		if timed != nil {
			var limit time.Time // none
			if n > 0 && !held {
				limit = time.Now().Add(flushAfter)
			}
			if timed.SetReadDeadline(limit) != nil {
				timed = nil
			}
		}
		k, err := r.Read(buf[n : maxLine-s.width])
		o.keep(s, buf[n:n+k])
		n, held = n+k, held && k == 0
		lines := 1 + bytes.LastIndexAny(buf[:n], "\r\n")
		o.emit(s, buf[:lines], false)
		n = copy(buf, buf[lines:n])
		late := timed == nil || errors.Is(err, os.ErrDeadlineExceeded)
		switch full := n+s.width >= maxLine; {
		case err != nil && !late:
			o.emit(s, buf[:n], false)
			o.closeLine(s)
			return
		case late || full:
			whole := cut(buf[:n])
			o.emit(s, buf[:whole], full && !o.raw)
			n = copy(buf, buf[whole:n])
			held = n > 0
		}
	}
}

// cut returns the length of the longest part of b that does not end within a UTF-8 sequence or an escape
// sequence of a terminal.
func cut(b []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-i:]) {
				b = b[:len(b)-i]
			}
			break
		}
	}
	if i := bytes.LastIndexByte(b, 0x1b); i >= 0 && len(b)-i < maxEscape && !wholeEscape(b[i+1:]) {
		// An operating system command may end with ESC and a backslash.
		if before := bytes.LastIndexByte(b[:i], 0x1b); i == len(b)-1 && before >= 0 && i-before < maxEscape && !wholeEscape(b[before+1:i]) {
			return before
		}
		return i
	}
	return len(b)
}

// wholeEscape reports whether b, which follows an ESC, begins with the rest of an escape sequence.
func wholeEscape(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	switch b[0] {
	case '[': // parameters, intermediate bytes and a final byte
		return bytes.ContainsFunc(b[1:], func(r rune) bool { return r >= 0x40 && r <= 0x7e })
	case ']', 'P', '_', '^': // a string until BEL or ESC and a backslash
		return bytes.IndexByte(b, '\a') >= 0
	case '(', ')', '#', '%', ' ':
		return len(b) > 1
	}
	return true
}

// emit writes data: lines, and perhaps the beginning of one, which ends here if last is true.
func (o *output) emit(s *stream, data []byte, last bool) {
	if len(data) == 0 && !last {
		return
	}
	o.wrote(s, data, last)
	s.to.write(s, func(open bool) ([]byte, bool) { return o.format(s, data, open, last) })
}

// format returns the printed form of data, with control characters quoted
// unless the output is raw.
func (o *output) format(s *stream, data []byte, open, last bool) (text []byte, opened bool) {
	head := ""
	if o.prefix {
		head = "[" + s.from.name() + "] "
	}
	text = make([]byte, 0, len(data)+len(head)+16)
	for piece, end := range pieces(data, last) {
		if !open && (len(piece) > 0 || end == '\n' && !s.printed || o.raw && end == '\r') {
			text, open = append(text, head...), true
		}
		switch {
		case o.raw:
			text = append(text, piece...)
		default:
			text = append(text, safe.Lines(string(piece))...)
		}
		switch {
		case o.raw && end == '\r':
			text = append(text, '\r')
		case end != 0 && open:
			text, open = append(text, '\n'), false
		}
		s.width += len(piece)
		if end != 0 || o.raw { // raw output is not split
			s.width = 0
		}
		s.printed = end != '\n' && (s.printed || len(piece) > 0)
	}
	return text, open
}

// pieces yields the pieces of data and their ends: '\n', '\r', or 0 for the
// beginning of a line, which ends with '\r' if last is true.
func pieces(data []byte, last bool) iter.Seq2[[]byte, byte] {
	return func(yield func([]byte, byte) bool) {
		for len(data) > 0 {
			i := bytes.IndexAny(data, "\r\n")
			if i < 0 {
				break
			}
			if !yield(data[:i], data[i]) {
				return
			}
			data = data[i+1:]
		}
		switch {
		case last:
			yield(data, '\r')
		case len(data) > 0:
			yield(data, 0)
		}
	}
}

// closeLine ends the line of a stream, so that a prefix or a message of the launcher starts a line. Raw
// output without prefixes stays as the worker has written it, for example as a binary file.
func (o *output) closeLine(s *stream) {
	if o.raw && !o.prefix {
		return
	}
	s.to.write(s, func(open bool) ([]byte, bool) {
		if open {
			return []byte{'\n'}, false
		}
		return nil, false
	})
}

// keep writes to the log file, byte for byte, until a write fails, which it
// reports.
func (o *output) keep(s *stream, line []byte) {
	if s.log == nil {
		return
	}
	if _, err := s.log.Write(line); err != nil {
		o.warn(fmt.Sprintf("stopped writing the log of %s: %v", s.from.name(), err))
		s.log = nil
	}
}

// wrote records output before it is written.
func (o *output) wrote(s *stream, data []byte, last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.writer != s.from {
		if t := o.tails[o.writer]; t != nil {
			t.buried = true
		}
		o.writer = s.from
	}
	if !s.stderr {
		return
	}
	t := o.tails[s.from]
	if t == nil {
		t = &tail{}
		o.tails[s.from] = t
	}
	for piece, end := range pieces(data, last) {
		t.add(piece, end)
	}
}

// add adds a piece of a line. Like a terminal, it keeps only the last of the pieces of progress that
// carriage returns separate.
func (t *tail) add(piece []byte, end byte) {
	text := safe.Lines(string(piece[:min(len(piece), tailWidth)]))
	n := len(t.lines)
	switch old := t.end; {
	case n == 0 || old == '\n':
		if n == keptLines {
			t.lines = t.lines[1:]
		}
		t.lines = append(t.lines, text)
	case old == '\r' && text != "":
		t.lines[n-1] = text
	case len(t.lines[n-1]) < tailWidth:
		t.lines[n-1] += text
	}
	t.end, t.buried = end, false
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
