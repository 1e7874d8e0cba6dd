package graph_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

var (
	updateTable = flag.Bool("update", false, "write docs/CAPTURES.md anew: the column of virtual devices, and that of CUDA if there is a GPU")
	tableTo     = flag.String("captures", "", "write the table of captures to the `file`, and the texts of all errors to file.log")
)

// parityTable is what the test compares with.
var parityTable = filepath.Join("..", "docs", "CAPTURES.md")

// A call is one public call that a captured function may make.
type call struct {
	name    string // package.Type.Method, and after a colon what is special
	nowhere bool   // it acts on no stream that a caller chooses
	// prepare allocates what the call needs, outside of the capture.
	prepare func(r *rig) func() error
}

// An origin says where a captured function makes a call.
type origin struct {
	name   string
	inside bool // it acts on the stream that is captured
	hop    bool // another goroutine makes it
}

var (
	somewhere = []origin{
		{"captured stream", true, false},
		{"other stream", false, false},
		{"captured stream, other goroutine", true, true},
		{"other stream, other goroutine", false, true},
	}
	nowhere = []origin{{"same goroutine", false, false}, {"other goroutine", false, true}}
	modes   = []graph.Mode{graph.ThreadLocal, graph.Global, graph.Relaxed}
)

// A rig is what one program uses: a call, made in one place, in a capture of one mode.
type rig struct {
	t        *testing.T
	ctx      context.Context
	dev      *device.Device
	kit      *bench
	ring     *ring
	captured *stream.Stream // what the program captures
	on       *stream.Stream // what the call acts on
	home     *stream.Stream // idle; memory was allocated on it
	third    *stream.Stream // idle, and of no part in anything
	inside   bool
	x, y     memory.Slice[float32]
	closers  []func() error
}

// unready is the panic of a program that could not be prepared.
type unready struct{ error }

func (r *rig) must(err error) {
	if err != nil {
		panic(unready{err})
	}
}

// later calls fn after the capture, before what was made earlier goes.
func (r *rig) later(fn func() error) { r.closers = append(r.closers, fn) }

func (r *rig) stream() *stream.Stream {
	s, err := stream.New(r.dev, nil)
	r.must(err)
	r.later(s.Close)
	return s
}

func (r *rig) slice(s *stream.Stream, n int) memory.Slice[float32] {
	x, err := memory.Make[float32](s, n)
	r.must(err)
	r.later(x.Close)
	r.must(x.Zero(s))
	r.must(s.Sync(r.ctx))
	return x
}

// own captures a stream that the call brings along, such as a group's.
func (r *rig) own(s *stream.Stream) {
	r.on = s
	if r.inside {
		r.captured = s
	}
}

// run issues the program's call in a capture and returns the kinds of the errors of the
// call and of the capture.
func run(t *testing.T, kit *bench, ring *ring, c call, from origin, mode graph.Mode) (cell, texts string) {
	r := &rig{t: t, ctx: testgpu.Context(t), dev: kit.dev, kit: kit, ring: ring, inside: from.inside}
	defer func() {
		if p, ok := recover().(unready); ok {
			cell, texts = "not prepared: "+kindOf(p.error), p.Error()
		}
		for i := len(r.closers) - 1; i >= 0; i-- {
			if err := r.closers[i](); err != nil {
				t.Errorf("%s, %s, %s: close: %v", c.name, from.name, mode, err)
			}
		}
		if err := ring.drop(false); err != nil {
			t.Errorf("%s, %s, %s: close: %v", c.name, from.name, mode, err)
		}
		require.NoError(t, kit.dev.Err(), "%s, %s, %s", c.name, from.name, mode)
	}()
	r.captured, r.home, r.third = r.stream(), r.stream(), r.stream()
	if r.on = r.captured; !from.inside {
		r.on = r.stream()
	}
	r.x, r.y = r.slice(r.home, elems), r.slice(r.home, elems)
	fn := c.prepare(r)
	r.must(kit.dev.Sync(r.ctx))
	var of error
	x, err := graph.Capture([]*stream.Stream{r.captured}, func() error {
		if err := kit.launch(kit.add, r.captured, r.x, 1); err != nil {
			return err
		}
		of = make1(from, fn)
		_ = kit.launch(kit.add, r.captured, r.x, 1)
		return nil
	}, &graph.Config{Mode: mode})
	if x != nil {
		r.later(x.Close)
	}
	if err := kit.dev.Sync(r.ctx); err != nil {
		t.Errorf("%s, %s, %s: sync: %v", c.name, from.name, mode, err)
	}
	cell = kindOf(of)
	if err != nil {
		cell += "; capture: " + kindOf(err)
	}
	return cell, text(of) + text(err)
}

// make1 issues the call from where the program has it.
func make1(from origin, fn func() error) error {
	if !from.hop {
		return fn()
	}
	done := make(chan error)
	go func() { done <- fn() }()
	return <-done
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return "\n\t" + strings.ReplaceAll(err.Error(), "\n", "\n\t")
}

// kindOf returns what errors.As and errors.Is tell of an error.
func kindOf(err error) string {
	var ce *device.CaptureError
	var use *nccl.InUseError
	var oom *memory.OutOfMemoryError
	var ue *device.UnsupportedError
	var ne *nccl.Error
	var up *graph.UpdateError
	var de *device.Error
	var st device.Status
	var nr nccl.Result
	var cu cublasapi.Result
	var cf cufileapi.Result
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &ce):
		return "CaptureError"
	case errors.As(err, &use):
		return "nccl.InUseError"
	case errors.As(err, &oom):
		return "OutOfMemoryError"
	case errors.As(err, &ue):
		return "UnsupportedError"
	case errors.As(err, &up):
		return "UpdateError"
	case errors.As(err, &de):
		return short(de.Err.Error())
	case errors.As(err, &ne):
		return ne.Err.Error()
	case errors.As(err, &nr):
		return nr.Error()
	case errors.As(err, &cu):
		return cu.Error()
	case errors.As(err, &cf):
		return cf.Error()
	case errors.As(err, &st):
		return short(st.Error())
	case errors.Is(err, stream.ErrCapturing):
		return "ErrCapturing"
	case errors.Is(err, device.ErrClosed):
		return "ErrClosed"
	case errors.Is(err, memory.ErrView):
		return "ErrView"
	case errors.Is(err, context.DeadlineExceeded):
		return "DeadlineExceeded"
	}
	return "error"
}

func short(status string) string { return strings.TrimPrefix(status, "CUDA_ERROR_") }

// TestCaptures issues every public call in captures of every mode, and compares what
// comes of it with docs/CAPTURES.md, and virtual devices with CUDA.
func TestCaptures(t *testing.T) {
	want := readParity(t)
	got := parity{}
	var log strings.Builder
	var mu sync.Mutex
	save := func() {
		mu.Lock()
		defer mu.Unlock()
		if *tableTo != "" {
			require.NoError(t, os.WriteFile(*tableTo, []byte(want.over(got).markdown()), 0o644))
			require.NoError(t, os.WriteFile(*tableTo+".log", []byte(log.String()), 0o644))
		}
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		backend := devs[0].System().Backend()
		kit, ring := newBench(t, devs[0]), &ring{}
		defer func() { require.NoError(t, ring.drop(true)) }()
		for _, c := range calls() {
			require.NoError(t, devs[0].Err(), "before %s", c.name)
			t.Run(c.name, func(t *testing.T) {
				for _, p := range c.programs() {
					stuck := time.AfterFunc(time.Minute, func() {
						fmt.Fprintf(os.Stderr, "captures: %s on %s does not come back\n", p, backend)
						save()
						os.Exit(3)
					})
					cell, texts := run(t, kit, ring, c, p.from, p.mode)
					stuck.Stop()
					mu.Lock()
					got.set(p, backend, cell)
					if texts != "" {
						fmt.Fprintf(&log, "%s on %s: %s%s\n", p, backend, cell, texts)
					}
					mu.Unlock()
				}
			})
		}
		save()
	})
	if *updateTable {
		require.NoError(t, os.WriteFile(parityTable, []byte(want.over(got).markdown()), 0o644))
		want = readParity(t)
	}
	if len(want) == 0 {
		want = got // there are no documents here
	}
	want.compare(t, got)
}

// programs returns the call in every place and mode.
func (c call) programs() (ps []program) {
	origins := somewhere
	if c.nowhere {
		origins = nowhere
	}
	for _, o := range origins {
		for _, m := range modes {
			ps = append(ps, program{c.name, o, m})
		}
	}
	return ps
}

// A program is one call, made in one place, in a capture of one mode.
type program struct {
	name string
	from origin
	mode graph.Mode
}

func (p program) String() string { return fmt.Sprintf("%s, %s, %s", p.name, p.from.name, p.mode) }

// calls returns every call, by package.
func calls() (all []call) {
	for _, list := range [][]call{streamCalls, eventCalls, defaultCalls, deviceCalls, graphCalls, memoryCalls, copyCalls, poolCalls, pinnedCalls, kernelCalls, tensorCalls, rngCalls, drawCalls, gdsCalls, optimCalls, ampCalls, ncclCalls, commCalls, ddpCalls, joinCalls} {
		all = append(all, list...)
	}
	return all
}
