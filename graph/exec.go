package graph

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Exec is a captured graph that can be launched (CUgraphExec,
// torch.cuda.CUDAGraph).
type Exec struct {
	owner handle.Owner
	name  string
	dev   *device.Device // of the first stream

	capturing atomic.Bool // until the end of the capture
	doomed    atomic.Bool // a captured communicator was aborted during the capture

	// mu is held for reading by the calls that use the graph, so that Close
	// waits for them.
	mu    sync.RWMutex
	graph cudadrv.Graph // retained for Update and Dot
	exec  cudadrv.GraphExec
	nodes int
	held  []gpu.Holdable // objects that must not be closed before the graph
	pool  *memory.Pool   // of the capture; held contains it too

	own     []gpu.Preparer // from the captured objects
	prepare []gpu.Preparer // called before each launch: own, or from an update
}

var numbers atomic.Int64

func newExec(name string, dev *device.Device) *Exec {
	if name == "" {
		name = strconv.FormatInt(numbers.Add(1), 10)
	}
	x := &Exec{name: name, dev: dev}
	x.capturing.Store(true)
	return x
}

// String returns the name of the graph in errors, such as "graph step of cuda:0".
func (x *Exec) String() string { return fmt.Sprintf("graph %s of %s", x.name, x.dev) }

// Pool returns the pool that the capture allocated from, for Config.Pool of another
// capture (torch.cuda.CUDAGraph.pool).
func (x *Exec) Pool() *memory.Pool { return x.pool }

// Nodes returns the number of operations that were captured. It is 0 if the captured
// function enqueued nothing, or another goroutine enqueued its work on other streams.
func (x *Exec) Nodes() int { return x.nodes }

// Launch enqueues the graph on s, which may be on any device (cuGraphLaunch,
// torch.cuda.CUDAGraph.replay). The graph begins after the operations that are already
// enqueued on s, and operations that are enqueued on s later begin after the whole graph.
// The host does not wait, except that CUDA may block until there is room. A launch begins
// after the previous one of the same Exec has ended.
func (x *Exec) Launch(s *stream.Stream) error {
	const op = "graph: launch"
	if err := x.enter(op, s); err != nil {
		return err
	}
	defer x.mu.RUnlock()
	done, err := x.prepareOn(s)
	if err == nil {
		err = gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphLaunch(x.exec, gpu.StreamOf(s).Raw()) })
	}
	for _, p := range x.prepare[:done] {
		p.Launched(s, err)
	}
	return x.wrap(op, err)
}

// prepareOn calls the preparers for a launch on s, and returns how many succeeded.
func (x *Exec) prepareOn(s *stream.Stream) (done int, err error) {
	for i, p := range x.prepare {
		if err := p.Prepare(s); err != nil {
			return i, err
		}
	}
	return len(x.prepare), nil
}

// Upload enqueues on s the work that the first Launch would otherwise do before the graph
// runs (cuGraphUpload).
func (x *Exec) Upload(s *stream.Stream) error {
	const op = "graph: upload"
	if err := x.enter(op, s); err != nil {
		return err
	}
	defer x.mu.RUnlock()
	err := gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphUpload(x.exec, gpu.StreamOf(s).Raw()) })
	return x.wrap(op, err)
}

// Update gives x the parameters of other's operations, such as addresses and numbers,
// which takes less time than instantiating another graph (cuGraphExecUpdate). Launches
// that are already enqueued keep the old parameters. Both graphs must have the same
// operations in the same order; if not, the error is an *UpdateError and x does not
// change. other may be closed afterwards, but x then holds the objects that other has
// captured. The memory that other's copies and fills use must not be freed before the call:
// CUDA's driver may crash then.
func (x *Exec) Update(other *Exec) error {
	const op = "graph: update"
	if x == other {
		return x.check(op)
	}
	updating.Lock()
	defer updating.Unlock()
	if err := other.rlock(op); err != nil {
		return err
	}
	defer other.mu.RUnlock()
	if x == nil {
		return x.check(op)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := x.check(op); err != nil {
		return err
	}
	var why cudadrv.GraphExecUpdateResult
	err := gpu.DeviceOf(x.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		reason, r := drv.GraphExecUpdate(x.exec, other.graph)
		if r == cudadrv.ErrorGraphExecUpdateFailure { // false while NameOf runs the call to find its name
			why = reason
		}
		return r
	})
	if errors.Is(err, ErrorUpdate) {
		return &UpdateError{Graph: x.String(), Other: other.String(), Reason: why.Meaning(), Err: err}
	}
	if err == nil {
		x.hold(other.held)
		x.prepare = other.own
	}
	return x.wrap(op, err)
}

// updating is held while two graphs are locked, so that two updates cannot deadlock.
var updating sync.Mutex

// hold holds further objects for the graph. x.mu is held.
func (x *Exec) hold(list []gpu.Holdable) {
	for _, h := range list {
		if !slices.Contains(x.held, h) {
			h.Hold(x)
			x.held = append(x.held, h)
		}
	}
}

// Dot writes the captured graph in the Graphviz language (cuGraphDebugDotPrint,
// torch.cuda.CUDAGraph.debug_dump). It shows the graph as captured; Update does not affect
// it.
func (x *Exec) Dot(w io.Writer) error {
	const op = "graph: dot"
	if err := x.rlock(op); err != nil {
		return err
	}
	defer x.mu.RUnlock()
	dir, err := os.MkdirTemp("", "chorus-dot-") // only this user can change its contents
	if err != nil {
		return x.wrap(op, err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "graph.dot") // the driver writes only to files
	err = gpu.DeviceOf(x.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.GraphDebugDotPrint(x.graph, path, cudadrv.GraphDotVerbose)
	})
	if err != nil {
		return x.wrap(op, err)
	}
	f, err := safe.Open(path)
	if err != nil {
		return x.wrap(op, err)
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return x.wrap(op, err)
}

// Close closes the graph (torch.cuda.CUDAGraph.reset). It does not wait for a device:
// launches in progress still complete. Close is idempotent.
func (x *Exec) Close() error {
	if x == nil {
		return nil
	}
	if x.capturing.Load() { // only the abort of a communicator can reach x now
		x.doomed.Store(true)
		return stream.ErrCapturing
	}
	if !x.owner.Close() {
		return nil
	}
	// Calls in progress return soon, except for a launch that waits for a lost peer: it
	// ends when the communicators are aborted, and the graph is destroyed after it.
	if poll.UntilNoLaterThan(100*time.Millisecond, x.mu.TryLock) {
		defer x.mu.Unlock()
		return x.drop()
	}
	go func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		_ = x.drop()
	}()
	return nil
}

// preparers returns the captured objects that must be called before each launch.
func (x *Exec) preparers(held []gpu.Holdable) (list []gpu.Preparer) {
	for _, h := range held {
		switch h := h.(type) {
		case gpu.Preparer:
			list = append(list, h)
		case gpu.Counter:
			list = append(list, h.PreparerOf(x))
		}
	}
	return list
}

// instantiate creates the executable graph from the captured one.
func (x *Exec) instantiate() error {
	err := gpu.DeviceOf(x.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		n, r := drv.GraphGetNodes(x.graph)
		x.nodes = int(n)
		return r
	})
	if err != nil {
		return err
	}
	// cuBLAS may have captured allocations.
	const flags = cudadrv.GraphInstantiateAutoFree | cudadrv.GraphInstantiateNodePriority
	return gpu.DeviceOf(x.dev).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
		x.exec, r = drv.GraphInstantiateWithFlags(x.graph, flags)
		return r
	})
}

func (x *Exec) ready() {
	handle.Init(x, &x.owner, handle.About{Kind: "graph", On: x.dev})
	x.capturing.Store(false)
}

// drop destroys the graphs and releases the objects that the graph has held.
func (x *Exec) drop() error {
	x.capturing.Store(false)
	var errs []error
	if x.exec != 0 {
		errs = append(errs, gpu.DeviceOf(x.dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphExecDestroy(x.exec) }))
	}
	if x.graph != 0 {
		errs = append(errs, gpu.DeviceOf(x.dev).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphDestroy(x.graph) }))
	}
	x.exec, x.graph = 0, 0
	for _, h := range slices.Backward(x.held) {
		h.LetGo(x)
	}
	x.held = nil
	return errors.Join(errs...)
}

// enter read-locks x for a call that enqueues it on s.
func (x *Exec) enter(op string, s *stream.Stream) error {
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "graphs do not nest"); err != nil {
		return err
	}
	if err := x.rlock(op); err != nil {
		return err
	}
	if s.Device().System() != x.dev.System() {
		x.mu.RUnlock()
		return fmt.Errorf("%s %s: %s belongs to another system", op, x, s)
	}
	return nil
}

// rlock read-locks x if it is open.
func (x *Exec) rlock(op string) error {
	if x == nil {
		return fmt.Errorf("%s: no graph given", op)
	}
	x.mu.RLock()
	if err := x.check(op); err != nil {
		x.mu.RUnlock()
		return err
	}
	return nil
}

func (x *Exec) check(op string) error {
	if x == nil {
		return fmt.Errorf("%s: no graph given", op)
	}
	if x.owner.Closed() {
		return fmt.Errorf("%s %s: %w", op, x, device.ErrClosed)
	}
	return nil
}

func (x *Exec) wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", op, x, err)
}
