package differ

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
)

var (
	programs = flag.Int("programs", testhost.Rounds(500, 2500), "how many `programs` to run")
	seedFlag = flag.Uint64("seed", 1, "the `seed` of the programs")
	from     = flag.Int("from", -1, "the `index` of the first program; -1 draws one")
	parallel = flag.Int("parallel", 0, "how many `processes` run programs; 0 is one for each processor, -1 none: the test runs them")
	isWorker = flag.Bool("worker", false, "be a process that runs programs")
	isOne    = flag.Bool("worker.outcome", false, "be a process that runs one program on CUDA")
	withCUDA = flag.Bool("worker.cuda", false, "compare with CUDA")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *isWorker {
		os.Exit(workerMain(*withCUDA, *seedFlag))
	}
	if *isOne {
		os.Exit(outcomeMain())
	}
	if *from < 0 {
		*from = rand.IntN(40_000)
	}
	testgpu.Main(m)
}

// Programs on virtual devices do as the model predicts.
func TestVirtual(t *testing.T) { runAll(t, false) }

// Programs do the same on CUDA, on virtual devices and in the model.
func TestCUDA(t *testing.T) {
	testgpu.CUDA(t, 1)
	runAll(t, true)
}

// runAll gives the programs to worker processes.
func runAll(t *testing.T, cuda bool) {
	a := &arena{t: t, cuda: cuda, next: *from, end: *from + *programs, total: newTally(), signs: map[string]int{}}
	workers := *parallel
	if workers == 0 {
		workers = runtime.NumCPU()
	}
	start := time.Now()
	var wg sync.WaitGroup
	if workers < 0 {
		a.alone()
	}
	for range max(workers, 0) {
		wg.Go(a.serve)
	}
	wg.Wait()
	backend := "virtual devices and the model"
	if cuda {
		backend = "virtual devices, CUDA and the model"
	}
	t.Logf("%s: %d programs, %d operations, %d differences, %d vague, seed %d from %d, %.1f s", backend,
		a.total.Programs, a.total.Ops, a.failed, a.total.Vague, *seedFlag, *from, time.Since(start).Seconds())
	for _, sign := range slices.Sorted(maps.Keys(a.signs)) {
		t.Logf("%6d times: %s", a.signs[sign], sign)
	}
	if testing.Verbose() {
		t.Log("\n" + a.total.String())
	}
	if a.total.Programs < *programs*9/10 && a.failed == 0 {
		t.Errorf("only %d of %d programs ran: the rest had races", a.total.Programs, *programs)
	}
}

// An arena is one run of many programs.
type arena struct {
	t    *testing.T
	cuda bool

	mu        sync.Mutex
	next, end int
	total     *tally
	failed    int
	signs     map[string]int
}

// chunk is how many programs a worker gets at a time.
const chunk = 100

// How many differences end a run, and how many of a sign are shown.
const (
	mostFailures = 1000
	shown        = 2
)

func (a *arena) take() (from, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed >= mostFailures {
		return 0, 0
	}
	from, n = a.next, min(chunk, a.end-a.next)
	a.next += n
	return from, n
}

// alone runs the programs in this process, for a debugger or a profiler.
func (a *arena) alone() {
	w, err := newWorker(a.cuda)
	if err != nil {
		a.t.Fatal(err)
	}
	for i := a.next; i < a.end && a.failed < mostFailures; i++ {
		if f := w.guarded(generate(*seedFlag, i), a.total); f != nil {
			a.fail(f)
		}
	}
	w.close()
}

// serve keeps one worker busy, and replaces it when it dies.
func (a *arena) serve() {
	for from, n := a.take(); n > 0; {
		p, err := a.start()
		if err != nil {
			a.t.Errorf("start a worker: %v", err)
			return
		}
		from, n = a.feed(p, from, n)
		p.stop()
	}
}

// feed gives a worker ranges until there are no more or it dies, and returns the rest
// of the last range.
func (a *arena) feed(p *process, from, n int) (int, int) {
	for n > 0 {
		last, err := a.exchange(p, from, n)
		if err == nil {
			from, n = a.take()
			continue
		}
		if last < 0 {
			a.t.Errorf("a worker failed: %v\n%s", err, p.stderr())
			return 0, 0
		}
		if !errors.Is(err, errLost) {
			a.fail(&failure{Index: last, Class: "crash", Text: fmt.Sprintf("%v\n%s", err, p.stderr()), Program: generate(*seedFlag, last), Whole: true})
		}
		return last + 1, from + n - last - 1
	}
	return 0, 0
}

// errLost is the end of a worker that has lost its device and said so.
var errLost = errors.New("the worker has lost its device")

// exchange has a worker run a range. After an error, last is the program that it was
// at.
func (a *arena) exchange(p *process, from, n int) (last int, err error) {
	if _, err := fmt.Fprintln(p.in, from, n); err != nil {
		return -1, err
	}
	last = -1
	failed := false
	for {
		var m message
		if err := p.out.Decode(&m); err != nil {
			if failed {
				err = errLost
			}
			return last, err
		}
		switch {
		case m.Start != nil:
			last, failed = *m.Start, false
		case m.Fail != nil:
			failed = true
			a.fail(m.Fail)
		case m.Error != "":
			return -1, errors.New(m.Error)
		case m.Done != nil:
			a.mu.Lock()
			a.total.add(m.Done)
			a.mu.Unlock()
			return last, nil
		}
	}
}

func (a *arena) fail(f *failure) {
	a.mu.Lock()
	a.failed++
	if f.Sign == "" {
		f.Sign = f.Class
	}
	a.signs[f.Sign]++
	nth, signs := a.signs[f.Sign], len(a.signs)
	a.mu.Unlock()
	if nth <= shown {
		a.t.Error(describe(f, *seedFlag, signs <= 5 && !f.Whole))
	} else {
		a.t.Fail()
	}
}

// A process is a worker.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
	log *ends
}

func (a *arena) start() (*process, error) {
	args := []string{"-worker", fmt.Sprintf("-seed=%d", *seedFlag)}
	if a.cuda {
		args = append(args, "-worker.cuda")
	}
	p := &process{cmd: exec.Command(os.Args[0], args...), log: &ends{}}
	p.cmd.Stderr = p.log
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(bufio.NewReader(out))
	return p, p.cmd.Start()
}

func (p *process) stop() {
	p.in.Close()
	done := time.AfterFunc(30*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer done.Stop()
	_ = p.cmd.Wait() // its messages were read
}

func (p *process) stderr() string {
	_ = p.cmd.Wait()
	return p.log.String()
}

// String is a table of the kinds of operations and of their errors.
func (t *tally) String() string {
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(t.Count)) {
		fmt.Fprintf(&b, "%-20s", kind)
		for _, err := range slices.Sorted(maps.Keys(t.Count[kind])) {
			name := err
			if name == "" {
				name = "ok"
			}
			fmt.Fprintf(&b, " %s=%d", name, t.Count[kind][err])
		}
		b.WriteByte('\n')
	}
	return b.String()
}
