package cublas

import (
	"sync"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// lib implements cublasapi.API with gonum's matrix products.
type lib struct {
	m       *machine.Machine
	mu      sync.Mutex
	handles map[cublasapi.Handle]*handle
	loaded  map[loaded]bool // kernels that were used; guarded by the machine's lock
}

type handle struct {
	dev       *machine.Device
	stream    cudadrv.Stream
	workspace Span // empty if there is none
	mode      cublasapi.PointerMode
}

// A loaded is what products with one kernel have in common.
type loaded struct {
	dev            *machine.Device
	name           string
	a, b, c        cublasapi.DType
	transA, transB cublasapi.Op
}

// New returns the cuBLAS of a machine.
func New(m *machine.Machine) cublasapi.API {
	return &lib{m: m, handles: map[cublasapi.Handle]*handle{}, loaded: map[loaded]bool{}}
}

// begin consults the fault plan, unbinds the thread's context and looks up the
// handle, which must belong to the same device.
func (l *lib) begin(name string, h cublasapi.Handle) (*handle, bool, cublasapi.Result) {
	dev, hang, r := Begin(l.m, name)
	if r != cublasapi.Success {
		return nil, false, r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	handle := l.handles[h]
	if handle == nil || handle.dev != dev {
		return nil, false, cublasapi.NotInitialized
	}
	return handle, hang, cublasapi.Success
}

// Begin begins a call that needs a context: it consults the fault plan, unbinds the thread's
// context and returns its device. hang tells that the call's operation never ends.
func Begin(m *machine.Machine, name string) (dev *machine.Device, hang bool, r cublasapi.Result) {
	bound := m.Unbind()
	x := m.Fault(name)
	if x.Status != 0 {
		return nil, false, cublasapi.Result(x.Status)
	}
	m.Lock()
	defer m.Unlock()
	dev = m.Retained(bound)
	if dev == nil {
		return nil, false, cublasapi.NotInitialized
	}
	if dev.Status() != cudadrv.Success {
		return nil, false, cublasapi.ExecutionFailed
	}
	if m.Permits(name) != cudadrv.Success {
		return nil, false, cublasapi.NotInitialized
	}
	return dev, x.Hang, cublasapi.Success
}

func (l *lib) Create() (cublasapi.Handle, cublasapi.Result) {
	dev, _, r := Begin(l.m, "cublasCreate")
	if r != cublasapi.Success {
		return 0, r
	}
	l.m.Lock()
	h := cublasapi.Handle(l.m.Handle())
	l.m.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handles[h] = &handle{dev: dev}
	return h, cublasapi.Success
}

func (l *lib) Destroy(h cublasapi.Handle) cublasapi.Result {
	_ = l.m.Unbind()
	if x := l.m.Fault("cublasDestroy"); x.Status != 0 {
		return cublasapi.Result(x.Status)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handles[h] == nil {
		return cublasapi.NotInitialized
	}
	delete(l.handles, h)
	return cublasapi.Success
}

func (l *lib) SetStream(h cublasapi.Handle, s cudadrv.Stream) cublasapi.Result {
	handle, _, r := l.begin("cublasSetStream", h)
	if r != cublasapi.Success {
		return r
	}
	l.m.Lock()
	defer l.m.Unlock()
	st, res := l.m.Stream(handle.dev, s)
	if res != cudadrv.Success || st.Device() != handle.dev {
		return cublasapi.InvalidValue
	}
	handle.stream, handle.workspace = s, Span{}
	return cublasapi.Success
}

func (l *lib) SetWorkspace(h cublasapi.Handle, p cudadrv.DevicePtr, bytes uintptr) cublasapi.Result {
	handle, _, r := l.begin("cublasSetWorkspace", h)
	if r != cublasapi.Success {
		return r
	}
	if p%WorkspaceAlignment != 0 || p == 0 && bytes > 0 {
		return cublasapi.InvalidValue
	}
	handle.workspace = Span{uint64(p), uint64(p) + uint64(bytes)}
	return cublasapi.Success
}

// WorkspaceAlignment is the alignment of a workspace in bytes. Hopper gives wrong results if
// it is smaller.
const WorkspaceAlignment = 256

func (l *lib) SetMathMode(h cublasapi.Handle, m cublasapi.Math) cublasapi.Result {
	if _, _, r := l.begin("cublasSetMathMode", h); r != cublasapi.Success {
		return r
	}
	if m != cublasapi.DefaultMath && m != cublasapi.MathDisallowReducedPrecisionReduction {
		return cublasapi.InvalidValue
	}
	return cublasapi.Success // the sums over k are never made in parts
}

func (l *lib) SetPointerMode(h cublasapi.Handle, m cublasapi.PointerMode) cublasapi.Result {
	handle, _, r := l.begin("cublasSetPointerMode", h)
	if r != cublasapi.Success {
		return r
	}
	if m>>1 != 0 {
		return cublasapi.InvalidValue
	}
	handle.mode = m
	return cublasapi.Success
}

func (l *lib) SetSmCountTarget(h cublasapi.Handle, n int32) cublasapi.Result {
	if _, _, r := l.begin("cublasSetSmCountTarget", h); r != cublasapi.Success {
		return r
	}
	if n < 0 {
		return cublasapi.InvalidValue
	}
	return cublasapi.Success
}
