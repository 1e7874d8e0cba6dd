package memory

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/stream"
)

// ipcVar names the backend in the environment of a worker.
const ipcVar = "CHORUS_TEST_IPC"

// A task is what a worker is to do, and told is what it says then.
type task struct {
	Do     string // "add", "hold", "raw", "drop", "share" or "close"
	Handle IPCHandle
	Kind   string // of memory, to share
	N      int    // elements, to share or of Raw
	From   int32  // the first value that is there, or is to be
	Raw    CUDAIPCHandle
	Offset int // bytes from the start of Raw
}

type told struct {
	Handle IPCHandle
	Error  string
	Freed  int // how much of what it had shared is free by now
}

// TestIPCWorker is the other process of the tests below.
func TestIPCWorker(t *testing.T) {
	backend := os.Getenv(ipcVar)
	if backend == "" {
		t.Skip("a worker of other tests")
	}
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	if backend == "cuda" {
		dev = testgpu.CUDA(t, 1)[0]
	}
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	defer s.Close()
	lengthenClose(dev)
	w := &worker{t: t, s: s}
	in := json.NewDecoder(os.Stdin)
	for {
		var k task
		if err := in.Decode(&k); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		var a told
		if err := w.do(&k, &a); err != nil {
			a.Error = err.Error()
		}
		a.Freed = int(w.freed.Load())
		text, err := json.Marshal(a)
		require.NoError(t, err)
		fmt.Printf("told %s\n", text)
	}
	for _, x := range append(w.held, w.shared...) {
		require.NoError(t, x.Close())
	}
	nothingOpen(t, s)
}

type worker struct {
	t            testing.TB
	s            *stream.Stream
	held, shared []Slice[int32]
	freed        atomic.Int32
}

func (w *worker) do(k *task, a *told) error {
	switch k.Do {
	case "add", "hold":
		x, err := OpenIPC[int32](w.s, k.Handle)
		if err != nil {
			return err
		}
		got := make([]int32, x.Len())
		if err := x.CopyTo(w.s, got); err != nil {
			return err
		}
		if want := ints(x.Len(), k.From); !slices.Equal(got, want) {
			return fmt.Errorf("it has %d…, not %d…", got[0], k.From)
		}
		if k.Do == "hold" {
			w.held = append(w.held, x)
			return nil
		}
		return first(x.CopyFrom(w.s, ints(x.Len(), k.From+1)), x.Close())
	case "raw":
		x, err := OpenCUDAIPC[int32](w.s, k.Raw, k.Offset, k.N)
		if err != nil {
			return err
		}
		if got, want := read(w.t, w.s, x), ints(k.N, k.From); !slices.Equal(got, want) {
			return fmt.Errorf("it has %d…, not %d…", got[0], k.From)
		}
		return errors.Join(x.CopyFrom(w.s, ints(k.N, k.From+1)), x.Close())
	case "drop":
		for _, x := range w.held {
			if err := x.Close(); err != nil {
				return err
			}
		}
		w.held = nil
	case "share":
		x := shareables[k.Kind](w.t, w.s, k.N, &w.freed)
		w.shared = append(w.shared, x)
		err := x.CopyFrom(w.s, ints(k.N, k.From))
		if err != nil {
			return err
		}
		a.Handle, err = x.IPCHandle()
		return err
	case "close":
		for _, x := range w.shared {
			if err := x.Close(); err != nil {
				return err
			}
		}
		w.shared = nil
	}
	return nil
}

func first(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// A process runs a worker.
type process struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startWorker(t testing.TB, dev *device.Device) *process {
	t.Helper()
	cmd := exec.CommandContext(testgpu.Context(t), os.Args[0], "-test.run=^TestIPCWorker$", "-test.v")
	cmd.Env = append(os.Environ(), ipcVar+"="+dev.System().Backend())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &process{t: t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(p.kill)
	return p
}

// ask gives the worker a task.
func (p *process) ask(k task) (a told) {
	p.t.Helper()
	require.NoError(p.t, json.NewEncoder(p.in).Encode(k))
	return p.hear()
}

func (p *process) hear() (a told) {
	p.t.Helper()
	for p.out.Scan() {
		if text, ok := strings.CutPrefix(p.out.Text(), "told "); ok {
			require.NoError(p.t, json.Unmarshal([]byte(text), &a))
			return a
		}
		p.t.Log(p.out.Text())
	}
	p.t.Fatal("the worker has ended")
	return a
}

// kill ends the worker at once and waits until it is gone.
func (p *process) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// end lets the worker end by itself.
func (p *process) end() {
	p.t.Helper()
	require.NoError(p.t, p.in.Close())
	for p.out.Scan() {
	}
	require.NoError(p.t, p.cmd.Wait())
}

// eachShareable runs a test with both kinds of memory, on virtual devices and on CUDA.
func eachShareable(t *testing.T, fn func(t *testing.T, s *stream.Stream, kind string)) {
	for kind := range shareables {
		t.Run(kind, func(t *testing.T) {
			testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
				s, err := stream.New(devs[0], nil)
				require.NoError(t, err)
				defer s.Close()
				lengthenClose(devs[0])
				fn(t, s, kind)
			})
		})
	}
}

// Memory goes to another process and back, many times; nothing is left.
func TestIPCOfProcesses(t *testing.T) {
	eachShareable(t, func(t *testing.T, s *stream.Stream, kind string) {
		exchanges := testhost.Rounds(100, 500)
		if testing.Short() {
			exchanges = 50
		}
		w := startWorker(t, s.Device())
		rnd := rand.New(rand.NewPCG(1, 2))
		var freed atomic.Int32
		made := 0
		var x Slice[int32]
		before := 0
		for i := range exchanges {
			if i%10 == 0 {
				require.NoError(t, x.Close())
				require.EqualValues(t, made, freed.Load())
				x = shareables[kind](t, s, 1+rnd.IntN(5000), &freed)
				made++
			}
			if i == 20 {
				runtime.GC()
				before = files(t)
			}
			lo := rnd.IntN(x.Len())
			part := x.Slice(lo, lo+1+rnd.IntN(x.Len()-lo))
			require.NoError(t, part.CopyFrom(s, ints(part.Len(), int32(i))))
			h, err := part.IPCHandle()
			require.NoError(t, err)
			require.Empty(t, w.ask(task{Do: "add", Handle: h, From: int32(i)}).Error)
			require.Equal(t, ints(part.Len(), int32(i+1)), read(t, s, part))
		}
		soon(t, func() bool { return files(t) <= before+2 })
		require.NoError(t, x.Close())
		require.EqualValues(t, made, freed.Load())
		w.end()
	})
}

// Memory goes to another process by plain handles of CUDA.
func TestCUDAIPCOfProcesses(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		w := startWorker(t, devs[0])
		var freed atomic.Int32
		x := shareables["segment"](t, s, 5000, &freed)
		part := x.Slice(100, 4100)
		for i := range 10 {
			require.NoError(t, part.CopyFrom(s, ints(part.Len(), int32(i))))
			require.NoError(t, s.Sync(t.Context()))
			h, offset, err := part.CUDAIPCHandle()
			require.NoError(t, err)
			require.Empty(t, w.ask(task{Do: "raw", Raw: h, Offset: offset, N: part.Len(), From: int32(i)}).Error)
			require.Equal(t, ints(part.Len(), int32(i+1)), read(t, s, part))
			require.Contains(t, w.ask(task{Do: "raw", Raw: h, Offset: offset, N: 1 << 24, From: 0}).Error, "the allocation has ")
		}
		w.end()
		require.NoError(t, x.Close())
	})
}

// A process that is killed gives up all that it had open.
func TestIPCReceiverIsKilled(t *testing.T) {
	eachShareable(t, func(t *testing.T, s *stream.Stream, kind string) {
		rounds := 4
		if testing.Short() {
			rounds = 2
		}
		var freed atomic.Int32
		made := 0
		for round := range rounds {
			a, b := startWorker(t, s.Device()), startWorker(t, s.Device())
			var list []Slice[int32]
			for i := range 6 {
				x := shareables[kind](t, s, 1000, &freed)
				made++
				require.NoError(t, x.CopyFrom(s, ints(1000, int32(i))))
				h, err := x.IPCHandle()
				require.NoError(t, err)
				require.Empty(t, a.ask(task{Do: "hold", Handle: h, From: int32(i)}).Error)
				require.Empty(t, a.ask(task{Do: "hold", Handle: h, From: int32(i)}).Error)
				if i%2 == 0 {
					require.Empty(t, b.ask(task{Do: "hold", Handle: h, From: int32(i)}).Error)
				}
				list = append(list, x)
			}
			for _, x := range list[1:] {
				require.NoError(t, x.Close())
			}
			require.EqualValues(t, made-6, freed.Load(), "all of it is open elsewhere")
			a.kill()
			require.NoError(t, IPCCollect(s.Device()))
			require.EqualValues(t, made-3, freed.Load(), "what b has stays, and what is open here")
			require.Empty(t, b.ask(task{Do: "drop"}).Error)
			require.EqualValues(t, made-1, freed.Load())
			require.NoError(t, list[0].Close())
			require.EqualValues(t, made, freed.Load())
			if round%2 == 0 {
				b.end()
			}
		}
		require.NoError(t, IPCCollect(s.Device()))
		v := ipcOf(s.Device()).server
		v.mu.Lock()
		defer v.mu.Unlock()
		require.Empty(t, v.peers)
		require.Empty(t, v.exports)
	})
}

// What a process had shared that is killed can be read and closed still, and
// opened no more.
func TestIPCProducerIsKilled(t *testing.T) {
	eachShareable(t, func(t *testing.T, s *stream.Stream, kind string) {
		rounds := 4
		if testing.Short() {
			rounds = 2
		}
		for range rounds {
			w := startWorker(t, s.Device())
			h := w.ask(task{Do: "share", Kind: kind, N: 3000, From: 9}).Handle
			x, err := OpenIPC[int32](s, h)
			require.NoError(t, err)
			y, err := OpenIPC[int32](s, h)
			require.NoError(t, err)
			require.Equal(t, ints(3000, 9), read(t, s, x))
			require.Zero(t, w.ask(task{Do: "close"}).Freed, "it is open here")
			w.kill()
			require.Equal(t, ints(3000, 9), read(t, s, y))
			_, err = OpenIPC[int32](s, h)
			require.Error(t, err)
			require.ErrorContains(t, err, "that process ")
			_, err = OpenIPC[int32](s, h)
			require.ErrorContains(t, err, "that process is gone")
			require.NoError(t, x.Close())
			require.NoError(t, y.Close())
			nothingOpen(t, s)
		}
	})
}

// Many goroutines of one process open and close what another has shared.
func TestIPCOfManyGoroutines(t *testing.T) {
	eachShareable(t, func(t *testing.T, s *stream.Stream, kind string) {
		w := startWorker(t, s.Device())
		var handles []IPCHandle
		for i := range 4 {
			a := w.ask(task{Do: "share", Kind: kind, N: 100, From: int32(i)})
			require.Empty(t, a.Error)
			handles = append(handles, a.Handle)
		}
		var failed atomic.Pointer[error]
		done := make(chan struct{})
		for g := range 8 {
			go func() {
				defer func() { done <- struct{}{} }()
				for i := range 40 {
					k := (g + i) % len(handles)
					x, err := OpenIPC[int32](s, handles[k])
					if err == nil {
						got := make([]int32, 100)
						err = first(x.CopyTo(s, got), x.Close())
						if err == nil && got[99] != int32(k+99) {
							err = fmt.Errorf("it has %d", got[99])
						}
					}
					if err != nil {
						failed.CompareAndSwap(nil, &err)
					}
				}
			}()
		}
		for range 8 {
			<-done
		}
		if err := failed.Load(); err != nil {
			t.Fatal(*err)
		}
		nothingOpen(t, s)
		require.Equal(t, 4, w.ask(task{Do: "close"}).Freed)
		w.end()
	})
}

// What is open of a process that is stopped is closed without it: it is waited for once,
// and knows when it goes on.
func TestIPCOfAStoppedProcess(t *testing.T) {
	a, b := aside(t), aside(t)
	var freed [3]atomic.Int32
	var theirs, mine []Slice[int32]
	for i := range freed {
		x := plainSlice(t, a, 8, &freed[i])
		h, err := x.IPCHandle()
		require.NoError(t, err)
		y, err := OpenIPC[int32](b, h)
		require.NoError(t, err)
		theirs, mine = append(theirs, x), append(mine, y)
	}
	ipcOf(b.Device()).closeTimeout = 50 * time.Millisecond
	v := ipcOf(a.Device()).server
	v.mu.Lock() // as if it were stopped
	require.NoError(t, mine[0].Close())
	ipcOf(b.Device()).closeTimeout = time.Hour // which the others do not wait again
	for _, y := range mine[1:] {
		require.NoError(t, y.Close())
	}
	v.mu.Unlock()
	nothingOpen(t, b)
	for i, x := range theirs {
		require.NoError(t, x.Close())
		soon(t, func() bool { return IPCCollect(a.Device()) == nil && freed[i].Load() == 1 })
	}
}

// A process that does not answer is given up.
func TestIPCWithoutAnAnswer(t *testing.T) {
	a, b := aside(t), aside(t)
	ipcOf(b.Device()).timeout = 50 * time.Millisecond
	var freed atomic.Int32
	x := plainSlice(t, a, 8, &freed)
	h, err := x.IPCHandle()
	require.NoError(t, err)
	v := ipcOf(a.Device()).server
	v.mu.Lock() // as if it were stopped
	_, err = OpenIPC[int32](b, h)
	v.mu.Unlock()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.ErrorContains(t, err, "that process does not answer")
	nothingOpen(t, b)
	ipcOf(b.Device()).timeout = ipcTimeout
	y, err := OpenIPC[int32](b, h)
	require.NoError(t, err)
	require.NoError(t, x.Close())
	require.NoError(t, y.Close())
	soon(t, func() bool { // the server may not have seen yet that the first has hung up
		return IPCCollect(a.Device()) == nil && freed.Load() == 1
	})
}
