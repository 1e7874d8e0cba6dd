package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A shadow runs launches on virtual devices a second time: the CUDA source, compiled for the host
// with a fiber for each thread. It finds what the Go functions cannot have: a grid that is too
// small, addresses outside of the arguments, traps. It compares only the memory that the Go function
// wrote, because other streams may use the rest.
type shadow struct {
	src  *Source
	said map[string][]declared
	p    *cudacc.HostProgram

	mu   sync.Mutex
	seen map[shadowed]int // launches that were compared
}

// A shadowed is what launches have in common of which only some are compared.
type shadowed struct {
	kernel          string
	blocks, threads [3]uint32
}

// The limits of what is compared, which keep tests fast.
const (
	shadowLaunches = 2           // of the same grid
	shadowGrids    = 16          // of a module
	shadowThreads  = 1 << 15     // of a launch
	shadowBytes    = 4 << 20     // of its arguments
	shadowSeconds  = 1           // of the processor
	shadowTime     = time.Minute // on a busy machine
)

// endless are the kernels that did not end on the host, by source and name: they wait for the host or
// for other blocks, and are not compared again.
var endless sync.Map

// openShadow compiles a source for the host. It returns nil without an error if launches are not
// compared: outside of tests, without a C++ compiler, or if the source needs more of CUDA than
// package cudacc has. An error is a mistake that every compiler finds.
func openShadow(src *Source, said map[string][]declared) (*shadow, error) {
	mode, err := env.VirtualKernels.OneOf("auto", "go", "both")
	if err != nil {
		return nil, err
	}
	if mode == "go" || mode == "auto" && flag.Lookup("test.v") == nil || inside.IsResident(src) || inside.IsGoOnly(src) || inside.Archive(src) != nil {
		return nil, nil
	}
	if hasState(withoutComments(src.CUDA)) {
		return nil, nil
	}
	key, err := hostKey(src)
	if err != nil {
		return nil, nil // for example without a compiler
	}
	store, refused := safe.UserStore(), safe.NewKey("not for the host", key).Sum()
	if _, ok := store.Load(refused); ok {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p, err := compileForHost(ctx, key, src)
	if err != nil && cudacc.IsSyntaxError(err) {
		return nil, &CompileError{Source: src.Name, Log: err.Error(), Err: cudacc.ErrorCompilation}
	}
	if err != nil {
		if ctx.Err() == nil {
			store.Save(refused, []byte("x"))
		}
		return nil, nil
	}
	p.Seconds = shadowSeconds
	return &shadow{src: src, said: said, p: p, seen: map[shadowed]int{}}, nil
}

// hasState reports whether a source has variables of the device, which keep their values from launch to
// launch.
func hasState(cuda string) bool {
	for {
		_, after, found := strings.Cut(cuda, "__device__")
		if !found {
			return strings.Contains(cuda, "__managed__")
		}
		cuda = after
		if i := strings.IndexAny(after, "(){};=["); i >= 0 && strings.ContainsRune(";=[", rune(after[i])) {
			return true
		}
	}
}

// hostKey returns the key of a source that is compiled for the host, or an
// error that matches exec.ErrNotFound if there is no g++.
func hostKey(src *Source) (string, error) {
	k, err := cudacc.HostKey()
	if err != nil {
		return "", err
	}
	k.Add(src.CUDA)
	k.Add(src.Options...)
	addHeaders(k, src.CUDA, src.Options)
	for _, d := range src.Kernels {
		k.Add(d.Name)
	}
	return k.Sum(), nil
}

// compileForHost compiles a source for the host, unless the user's store has it.
func compileForHost(ctx context.Context, key string, src *Source) (*cudacc.HostProgram, error) {
	return cudacc.StoredHostProgram(key, func() (*cudacc.HostProgram, error) {
		var names []string
		for _, d := range src.Kernels {
			names = append(names, d.Name)
		}
		return cudacc.CompileHost(ctx, src.CUDA, src.Options, names)
	})
}

func (h *shadow) close() error {
	if h == nil {
		return nil
	}
	return h.p.Close()
}

// covers reports whether launches of a kernel can be compared: the lengths of its arguments are
// additional parameters.
func (h *shadow) covers(d *Def) bool {
	return h != nil && !slices.ContainsFunc(d.Params, func(p Param) bool { _, ok := p.isStruct(); return ok }) && d.hasLengths()
}

// due reports whether a launch is to be compared.
func (h *shadow) due(name string, blocks, threads [3]uint32) bool {
	n := 1.0
	for i := range 3 {
		n *= float64(blocks[i]) * float64(threads[i])
	}
	if n > shadowThreads {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := shadowed{name, blocks, threads}
	if h.seen[key] >= shadowLaunches || h.seen[key] == 0 && len(h.seen) >= shadowGrids {
		return false
	}
	h.seen[key]++
	return true
}

// run calls the Go function of a kernel, and compares it with the source. A difference stops the
// kernel like an illegal access.
func (h *shadow) run(d *Def, call *machine.KernelCall, fn func()) {
	blocks, threads, shared := call.Shape()
	if _, waits := endless.Load(h.src.CUDA + d.Name); waits || !h.due(d.Name, blocks, threads) {
		fn()
		return
	}
	before, list, ok := h.arguments(d, call)
	if !ok {
		fn()
		return
	}
	var uses []machine.Use
	call.Trace(&uses)
	fn()
	call.Trace(nil)
	ctx, cancel := context.WithTimeout(context.Background(), shadowTime)
	defer cancel()
	if err := h.p.Run(ctx, d.Name, blocks, threads, shared, list); err != nil {
		if ctx.Err() != nil || errors.Is(err, cudacc.ErrProcessorTime) {
			endless.Store(h.src.CUDA+d.Name, true)
		} else {
			h.failed(d, err)
		}
		return
	}
	for _, u := range uses {
		for i := range before {
			switch {
			case before[i] == nil:
			case u.Write:
				h.compare(d, call, i, before[i], list[i].Memory[list[i].Before:], u)
			case !slices.ContainsFunc(uses, func(w machine.Use) bool {
				return w.Write && w.Ptr < u.Ptr+cudadrv.DevicePtr(u.Bytes) && u.Ptr < w.Ptr+cudadrv.DevicePtr(w.Bytes)
			}):
				h.unchanged(d, call, i, before[i], u)
			}
		}
	}
}

// failed stops a kernel whose source does not run to its end.
func (h *shadow) failed(d *Def, err error) {
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	if !ok {
		return
	}
	trouble := &machine.Trouble{Status: cudadrv.ErrorLaunchFailed}
	switch {
	case status.Signaled() && status.Signal() == syscall.SIGSEGV, status.Signaled() && status.Signal() == syscall.SIGBUS:
		trouble.Status = cudadrv.ErrorIllegalAddress
		trouble.Text = fmt.Sprintf("kernel %s: its CUDA source, run on the host, used an address outside of its arguments, or a misaligned one", d.Name)
	case status.Signaled() && status.Signal() == syscall.SIGILL:
		trouble.Status = cudadrv.ErrorMisalignedAddress
		trouble.Text = fmt.Sprintf("kernel %s: its CUDA source, run on the host, used a misaligned address", d.Name)
	case status.Signaled() && status.Signal() == syscall.SIGABRT:
		trouble.Text = fmt.Sprintf("kernel %s: its CUDA source, run on the host, stopped with a trap or a failed assertion", d.Name)
	case status.ExitStatus() == 3:
		trouble.Text = fmt.Sprintf("kernel %s: its CUDA source, run on the host: %v", d.Name, err)
	default:
		return
	}
	panic(trouble)
}

// arguments returns a copy of the memory at each pointer, and the arguments of the program. A pointer
// to memory of another argument shares the copy.
func (h *shadow) arguments(d *Def, call *machine.KernelCall) (before [][]byte, list []cudacc.HostArg, ok bool) {
	type place struct {
		from, to uint64 // addresses
		pointer  int    // its number among the pointers, from 1; 0 for other parameters
	}
	places := make([]place, len(d.Params))
	pointers := 0
	for i, p := range d.Params {
		if p == Pointer {
			bits := call.Bits(i, p.virtual())
			pointers++
			places[i] = place{bits, bits + call.Bits(len(d.Params)+i, machine.Int64Param), pointers}
		}
	}
	total := uint64(0)
	for i, p := range d.Params {
		x := places[i]
		arg := cudacc.HostArg{Null: x.pointer > 0 && x.from == 0}
		var data []byte
		switch owner := slices.IndexFunc(places[:i], func(y place) bool {
			return y.pointer > 0 && y.from < x.to && x.from < y.to
		}); {
		case p != Pointer:
			bits := call.Bits(i, p.virtual())
			arg.Value = binary.LittleEndian.AppendUint64(nil, bits)[:p.elem().Size()]
		case arg.Null:
		case owner >= 0:
			y := places[owner]
			if x.from < y.from || x.to > y.to || list[owner].Owner > 0 {
				return nil, nil, false // they overlap in part
			}
			arg.Owner, arg.Before = y.pointer, list[owner].Before+int(x.from-y.from)
		default:
			if total += x.to - x.from; x.from == x.to || total > shadowBytes {
				return nil, nil, false // of unknown length, or long
			}
			var valid bool
			if data, valid = call.Peek(cudadrv.DevicePtr(x.from), uintptr(x.to-x.from)); !valid {
				return nil, nil, false
			}
			arg.Before = int(x.from % 256) // the alignment of the address
			arg.Memory = append(make([]byte, arg.Before), data...)
		}
		before, list = append(before, data), append(list, arg)
	}
	return before, list, true
}

// unchanged stops a kernel whose Go function wrote memory of argument i that it had asked for to read.
func (h *shadow) unchanged(d *Def, call *machine.KernelCall, i int, before []byte, u machine.Use) {
	start := call.Ptr(i)
	lo, hi := max(u.Ptr, start), min(u.Ptr+cudadrv.DevicePtr(u.Bytes), start+cudadrv.DevicePtr(len(before)))
	if lo >= hi {
		return
	}
	got, ok := call.Peek(lo, uintptr(hi-lo))
	if !ok || slices.Equal(got, before[lo-start:hi-start]) {
		return
	}
	at := lo - start
	for k := range got {
		if got[k] != before[int(at)+k] {
			panic(&machine.Trouble{Status: cudadrv.ErrorLaunchFailed, Text: fmt.Sprintf(
				"kernel %s: its Go function wrote byte %d of argument %d, which it had asked for with Read, or which the source declares const", d.Name, int(at)+k, i)})
		}
	}
}

// compare compares the part of argument i that the Go function wrote.
func (h *shadow) compare(d *Def, call *machine.KernelCall, i int, before, want []byte, u machine.Use) {
	start := call.Ptr(i)
	lo, hi := max(u.Ptr, start), min(u.Ptr+cudadrv.DevicePtr(u.Bytes), start+cudadrv.DevicePtr(len(before)))
	if lo >= hi {
		return
	}
	got, ok := call.Peek(lo, uintptr(hi-lo))
	if !ok {
		return
	}
	t, known := memory.DType(0), false
	if ps := h.said[d.Name]; ps != nil && len(ps[i].types) > 0 {
		t, known = ps[i].types[0], true
	}
	at := lo - start
	before, want = before[at:at+hi-lo], want[at:at+hi-lo]
	if !known {
		h.compareRaw(d, call, i, int(at), before, got, want)
		return
	}
	size := cudadrv.DevicePtr(t.Size())
	if at%size != 0 {
		return
	}
	differ, first, scale := 0, -1, 0.0
	n := int((hi - lo) / size)
	for e := range n {
		if x := math.Abs(dtype.Of(t).Load(want, e).Float64()); x > scale && !math.IsInf(x, 0) {
			scale = x
		}
	}
	for e := range n {
		a, b := got[e*int(size):(e+1)*int(size)], want[e*int(size):(e+1)*int(size)]
		old := before[e*int(size) : (e+1)*int(size)]
		unwritten := slices.Equal(b, old)
		switch {
		case slices.Equal(a, b), slices.Equal(a, old): // the source may also use it for partial results
			continue
		case unwritten && !distant(t, dtype.Of(t).Load(got, e), dtype.Of(t).Load(want, e), scale, 0.01),
			!unwritten && !distant(t, dtype.Of(t).Load(got, e), dtype.Of(t).Load(want, e), scale, 1):
			continue
		}
		if differ++; first < 0 {
			first = e
		}
	}
	if differ == 0 {
		return
	}
	blocks, threads, _ := call.Shape()
	name := fmt.Sprintf("argument %d", i)
	if ps := h.said[d.Name]; ps != nil && ps[i].name != "" {
		name = ps[i].name
	}
	why := "the Go function and the CUDA source disagree"
	if slices.Equal(want[first*int(size):(first+1)*int(size)], before[first*int(size):(first+1)*int(size)]) {
		why = "the CUDA source does not write it; is the grid too small?"
	}
	panic(&machine.Trouble{Status: cudadrv.ErrorLaunchFailed, Text: fmt.Sprintf(
		"kernel %s with %v blocks of %v threads: its Go function wrote %v to element %d of %s, and its CUDA source, run on the host, %v; %d of %d elements differ: %s",
		d.Name, blocks, threads, dtype.Of(t).Load(got, first).Float64(), int(at/size)+first, name, dtype.Of(t).Load(want, first).Float64(), differ, n, why)})
}

// rawPart is the number of bytes that compareRaw looks at together.
const rawPart = 64

// compareRaw compares memory whose type the source does not say, for example T* in a template. If a number is rounded differently,
// all its bytes may differ, and some may be as before. So compareRaw only finds parts that the source does not write at all, while
// the Go function changes most of their bytes.
func (h *shadow) compareRaw(d *Def, call *machine.KernelCall, i, at int, before, got, want []byte) {
	for from := 0; from+rawPart <= len(got); from += rawPart {
		b, changed := before[from:from+rawPart], 0
		if !slices.Equal(b, want[from:from+rawPart]) {
			continue
		}
		for k, x := range got[from : from+rawPart] {
			if x != b[k] {
				changed++
			}
		}
		if changed <= rawPart/2 {
			continue
		}
		blocks, threads, _ := call.Shape()
		panic(&machine.Trouble{Status: cudadrv.ErrorLaunchFailed, Text: fmt.Sprintf(
			"kernel %s with %v blocks of %v threads: its Go function wrote bytes %d to %d of argument %d, and its CUDA source, run on the host, did not; is the grid too small?",
			d.Name, blocks, threads, at+from, at+from+rawPart-1, i)})
	}
}

// distant reports whether two numbers differ by more than rounding, for which strict is a factor.
// scale is the size of the numbers beside them.
func distant(t memory.DType, x, y dtype.Value, scale, strict float64) bool {
	a, b := x.Float64(), y.Float64()
	if math.IsNaN(a) || math.IsNaN(b) {
		return math.IsNaN(a) != math.IsNaN(b)
	}
	tolerance := map[memory.DType]float64{memory.Float64: 1e-6, memory.Float32: 1e-3, memory.Float16: 1e-2, memory.BFloat16: 5e-2,
		memory.Float8E4M3: 0.3, memory.Float8E5M2: 0.5}[t]
	return math.Abs(a-b) > strict*tolerance*(math.Max(math.Abs(a), math.Abs(b))+scale/100)
}
