package differ

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A message is what a worker tells, a line of JSON each.
type message struct {
	Start *int     `json:"start,omitempty"` // a program begins
	Fail  *failure `json:"fail,omitempty"`
	Done  *tally   `json:"done,omitempty"` // a range of programs has ended
	Error string   `json:"error,omitempty"`
}

// A failure is a program that differs.
type failure struct {
	Index   int
	Class   string
	Sign    string // alike for differences that probably have one cause
	Text    string
	Program *Program // shrunk
	Ops     int      // before
	Whole   bool     // it could not be shrunk
}

// A tally counts what programs have done.
type tally struct {
	Programs, Ops, Vague int
	Count                map[string]map[string]int // operations, by kind and by kind of error
}

func newTally() *tally { return &tally{Count: map[string]map[string]int{}} }

func (t *tally) note(kind, err string, n int) {
	if t.Count[kind] == nil {
		t.Count[kind] = map[string]int{}
	}
	t.Count[kind][err] += n
}

func (t *tally) add(o *tally) {
	t.Programs += o.Programs
	t.Ops += o.Ops
	t.Vague += o.Vague
	for kind, counts := range o.Count {
		for err, n := range counts {
			t.note(kind, err, n)
		}
	}
}

// newBench opens a backend and makes what its programs share.
func newBench(backend string) (*bench, error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: backend, VirtualDevices: 1})
	if err != nil {
		return nil, err
	}
	b := &bench{sys: sys, dev: sys.Devices()[0], kernels: map[string]*kernel.Kernel{}}
	if b.module, err = kernel.Compile(b.dev, &kernelSource); err != nil {
		return nil, err
	}
	for _, d := range kernelSource.Kernels {
		if b.kernels[d.Name], err = b.module.Kernel(d.Name); err != nil {
			return nil, err
		}
	}
	if b.mask, err = kernel.NewElementwise(maskCode, &maskConfig); err != nil {
		return nil, err
	}
	if b.s, err = stream.New(b.dev, nil); err != nil {
		return nil, err
	}
	b.host, err = memory.MakePinned[byte](b.dev, 1<<20)
	return b, err
}

// join gives the bench a communicator, which takes long.
func (b *bench) join() (err error) {
	id, err := nccl.NewUniqueID(b.dev)
	if err != nil {
		return err
	}
	if b.comm, err = nccl.NewCommunicator(context.Background(), b.dev, id, 0, 1, nil); err != nil {
		return err
	}
	return b.warm()
}

// newWholeBench is newBench with a communicator.
func newWholeBench(backend string) (*bench, error) {
	b, err := newBench(backend)
	if err != nil {
		return nil, err
	}
	return b, b.join()
}

// warm uses the communicator once, since a first use is forbidden in captures.
func (b *bench) warm() error {
	x, err := bufOf[int32](b.s, 8)
	if err != nil {
		return err
	}
	r := &runner{b: b, objs: map[int]any{1: b.s, 2: x}}
	for i := range collectives {
		op := &Op{K: "collective", S: 1, X: Ref{2, 0, 16}, Y: Ref{2, 16, 32}, A: int64(i)}
		if err := kinds[op.K].run(r, op, new(result)); err != nil {
			return err
		}
	}
	if err := b.s.Sync(context.Background()); err != nil {
		return err
	}
	return x.close()
}

// close gives up what newBench has made.
func (b *bench) close() error {
	if b.comm != nil {
		_ = b.comm.Close()
	}
	err := errors.Join(b.s.Close(), b.module.Close(), b.mask.Close(), b.host.Close())
	for _, x := range b.idle {
		err = errors.Join(err, x.s.Close())
	}
	return err
}

// A worker runs programs one after the other.
type worker struct {
	virtual, cuda *bench
	seen          map[string]int // differences, by their sign
	sticky        bool           // the last program on CUDA left an error
}

// spoiled reports whether further programs on CUDA would meet what one has left.
func (w *worker) spoiled() bool { return w.cuda != nil && (w.sticky || w.cuda.dev.Err() != nil) }

// programLimit is how long a program may take before it is taken for hung.
const programLimit = 60 * time.Second

func newWorker(cuda bool) (*worker, error) {
	w := &worker{seen: map[string]int{}}
	var err error
	if w.virtual, err = newWholeBench("virtual"); err == nil && cuda {
		w.cuda, err = newWholeBench("cuda")
	}
	return w, err
}

// workerMain is the main function of a worker's process: it reads ranges of programs and
// writes messages.
func workerMain(cuda bool, seed uint64) int {
	w, err := newWorker(cuda)
	out := json.NewEncoder(os.Stdout)
	if err != nil {
		_ = out.Encode(message{Error: err.Error()})
		return 1
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var from, n int
		if _, err := fmt.Sscan(in.Text(), &from, &n); err != nil {
			_ = out.Encode(message{Error: err.Error()})
			return 1
		}
		t := newTally()
		for i := from; i < from+n; i++ {
			_ = out.Encode(message{Start: &i})
			f := w.guarded(generate(seed, i), t)
			if f != nil {
				_ = out.Encode(message{Fail: f})
			}
			if w.spoiled() {
				return 1 // the next process has another context
			}
		}
		_ = out.Encode(message{Done: t})
	}
	return 0
}

// guarded is check within the time that a program may take.
func (w *worker) guarded(p *Program, t *tally) *failure {
	watch := time.AfterFunc(programLimit, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "program %d of seed %d hangs\n%s", p.Index, p.Seed, buf[:runtime.Stack(buf, true)])
		os.Exit(3)
	})
	d := w.check(p, t)
	watch.Stop()
	if d == nil {
		return nil
	}
	kind := kindAt(p, d.Op)
	f := &failure{Index: p.Index, Class: d.Class, Text: d.Text, Program: p, Ops: p.number(), Sign: d.Class + " of " + kind + d.Sign}
	if w.seen[f.Sign]++; w.seen[f.Sign] > 1 {
		f.Whole = true
		return f
	}
	fails := func(q *Program) bool {
		watch := time.AfterFunc(programLimit, func() { os.Exit(3) })
		defer watch.Stop()
		if w.spoiled() {
			return false
		}
		e := w.check(q, nil)
		return e != nil && e.Class == d.Class && e.Sign == d.Sign && kindAt(q, e.Op) == kind
	}
	if w.spoiled() || !fails(p.clone()) {
		f.Whole = true
		return f
	}
	f.Program = shrink(p.clone(), fails, 20*time.Second)
	if e := w.check(f.Program, nil); e != nil {
		f.Text = e.Text
	}
	return f
}

func kindAt(p *Program, at int) (kind string) {
	each(p.Ops, func(op *Op) {
		if op.at == at {
			kind = op.K
		}
	})
	return kind
}

// check runs a program on all backends and compares them with each other and with
// the model.
func (w *worker) check(p *Program, t *tally) *difference {
	m, wants, ok := predict(p)
	if !ok {
		return nil // a program that has a race, or more than the model knows
	}
	virtual, cuda, err := w.run(p)
	if err != nil {
		return &difference{Class: "worker", Op: -1, Text: err.Error()}
	}
	if t != nil {
		t.Programs++
		t.Ops += len(wants)
		if m.vague {
			t.Vague++
		}
		each(p.Ops, func(op *Op) { t.note(op.K, virtual.Results[op.at].Kind, 1) })
	}
	d := against(p, m, wants, virtual, "virtual devices")
	if d != nil {
		w.renew()
	}
	if cuda == nil {
		return d
	}
	if e := between(p, m, wants, virtual, cuda); e != nil {
		return e
	}
	if e := against(p, m, wants, cuda, "CUDA"); e != nil {
		return e
	}
	return d
}

// run runs a program on the worker's backends, or on fresh ones if it loses them.
func (w *worker) run(p *Program) (virtual, cuda *outcome, err error) {
	if !p.Fatal {
		virtual = run(w.virtual, p)
		if w.cuda != nil {
			cuda = run(w.cuda, p)
			w.sticky = cuda.Sticky != ""
		}
		return virtual, cuda, nil
	}
	b, err := newBench("virtual")
	if err != nil {
		return nil, nil, err
	}
	virtual = run(b, p)
	_ = b.close() // its device is lost
	if w.cuda != nil {
		cuda, err = runElsewhere(p)
	}
	return virtual, cuda, err
}

// runElsewhere runs a program on CUDA in a process of its own.
func runElsewhere(p *Program) (*outcome, error) {
	cmd := exec.Command(os.Args[0], "-worker.outcome")
	cmd.Stdin = strings.NewReader(p.String())
	var log ends
	cmd.Stderr = &log
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("a process for one program: %w: %s", err, log.String())
	}
	o := new(outcome)
	return o, json.Unmarshal(text, o)
}

// outcomeMain is the main function of such a process.
func outcomeMain() int {
	p := new(Program)
	if err := json.NewDecoder(os.Stdin).Decode(p); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	b, err := newBench("cuda")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := json.NewEncoder(os.Stdout).Encode(run(b, p)); err != nil {
		return 1
	}
	return 0
}

// renew replaces virtual devices that a program has lost or left in a mess.
func (w *worker) renew() {
	if b, err := newWholeBench("virtual"); err == nil {
		_ = w.virtual.close() // the programs have what they found of it
		w.virtual = b
	}
}

func (w *worker) close() {
	for _, b := range []*bench{w.virtual, w.cuda} {
		if b != nil {
			_ = b.close()
		}
	}
}

func describe(f *failure, seed uint64, inGo bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "program %d of seed %d differs (%s): %s\n", f.Index, seed, f.Class, f.Text)
	if f.Whole {
		b.WriteString("it was not shrunk\n")
	}
	if f.Program != nil {
		fmt.Fprintf(&b, "program (%d of %d operations):\n%v\n", f.Program.number(), f.Ops, f.Program)
		if !inGo {
			return b.String()
		}
		if code, err := goCode(f.Program); err == nil {
			b.WriteString(code)
		} else {
			fmt.Fprintf(&b, "cannot print it as Go: %v\n", err)
		}
	}
	return b.String()
}
