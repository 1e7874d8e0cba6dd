package virtual

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/ncclapi"
)

const maxDevices = 64

// Config describes a machine. The zero value of each field but Devices means
// its default.
type Config struct {
	Devices  int      // 1 to 64
	Seed     uint64   // of the streams' delays; 0 draws one
	SMs      int      // multiprocessors of each device; 132
	Memory   uintptr  // bytes of each device, counted and not reserved; 8 GiB
	Faults   string   // a fault plan: call#n=status, hang@call#n, lose@call#n, short@call#n, separated by commas
	Blocking bool     // the host waits for each kernel, copy and fill, as under CUDA_LAUNCH_BLOCKING
	Network  string   // where ranks listen: "" for this host's Unix sockets, or an IP address for TCP
	NCCL     int32    // the version of the virtual NCCL; 2.28.3
	Host     string   // whose devices they are, which decides their UUIDs; "" is the system's name
	PCIe     [][2]int // pairs of devices that PCIe joins; NVLink joins all others
}

// A Machine is one set of virtual devices. It needs no closing: what it holds
// is freed with its streams, events, memory and communicators.
type Machine struct {
	cfg     Config
	seed    uint64
	faults  faults
	threads threads
	images  images
	nccl    *ncclLib
	cublas  *cublasLib
	cufile  *cufileLib

	// mu guards everything below and all state of devices, streams, events and
	// blocks. It is held for bookkeeping only, never while data moves.
	mu           sync.Mutex
	room         sync.Cond // a stream with a full queue has done an operation
	initialized  bool
	devices      []*device
	streams      map[cudadrv.Stream]*stream
	events       map[cudadrv.Event]*event
	modules      map[cudadrv.Module]*module
	functions    map[cudadrv.Function]*function
	pinned       []*block // page-locked host memory, by address
	pools        map[cudadrv.MemPool]*pool
	physicals    map[cudadrv.MemHandle]*physical
	opened       map[openedKey]*opened
	id           uint64 // tells machines apart, in any process
	lastHandle   uintptr
	graphs       map[cudadrv.Graph]*graph
	execs        map[cudadrv.GraphExec]*graphExec
	objects      map[cudadrv.UserObject]*userObject
	captures     []*capture // that have not ended
	lastCapture  uint64
	captureModes map[int]cudadrv.CaptureMode // of OS threads that changed it
	slots        slots
	host         clock // what the host has waited for
	reports      []string
}

// New makes a machine. The only errors are those of the configuration.
func New(cfg *Config) (*Machine, error) {
	m := &Machine{
		streams:      map[cudadrv.Stream]*stream{},
		events:       map[cudadrv.Event]*event{},
		modules:      map[cudadrv.Module]*module{},
		functions:    map[cudadrv.Function]*function{},
		graphs:       map[cudadrv.Graph]*graph{},
		execs:        map[cudadrv.GraphExec]*graphExec{},
		objects:      map[cudadrv.UserObject]*userObject{},
		captureModes: map[int]cudadrv.CaptureMode{},
		pools:        map[cudadrv.MemPool]*pool{},
		physicals:    map[cudadrv.MemHandle]*physical{},
		opened:       map[openedKey]*opened{},
		id:           rand.Uint64(),
		lastHandle:   0x5000,
	}
	m.room.L = &m.mu
	if cfg != nil {
		m.cfg = *cfg
	}
	if m.cfg.Devices < 1 || m.cfg.Devices > maxDevices {
		return nil, fmt.Errorf("virtual: %d devices: want 1 to %d", m.cfg.Devices, maxDevices)
	}
	if m.cfg.NCCL == 0 {
		m.cfg.NCCL = DefaultNCCL
	}
	if m.cfg.SMs <= 0 {
		m.cfg.SMs = 132
	}
	if m.cfg.Memory == 0 {
		m.cfg.Memory = 8 << 30
	}
	if err := m.faults.parse(m.cfg.Faults); err != nil {
		return nil, err
	}
	for m.seed = m.cfg.Seed; m.seed == 0; {
		m.seed = rand.Uint64()
	}
	host := m.cfg.Host
	if host == "" {
		host, _ = os.Hostname() // a machine without a name is one of its own
	}
	for i := range m.cfg.Devices {
		m.devices = append(m.devices, newDevice(m, int32(i), host))
	}
	m.nccl = newNCCL(m)
	m.cublas = newCUBLAS(m)
	m.cufile = newCuFile(m)
	return m, nil
}

// Driver is the machine's CUDA driver.
func (m *Machine) Driver() cudadrv.Driver {
	if m.cfg.Blocking {
		return blocking{driver{m}}
	}
	return driver{m}
}

// NCCL is the machine's NCCL. It reports version 2.28.3.
func (m *Machine) NCCL() ncclapi.API { return m.nccl }

// CUBLAS is the machine's cuBLAS.
func (m *Machine) CUBLAS() cublasapi.API { return m.cublas }

// CuFile is the machine's cuFile. It reports version 1.15.
func (m *Machine) CuFile() cufileapi.API { return m.cufile }

// Seed is the seed from which streams draw their delays.
func (m *Machine) Seed() uint64 { return m.seed }

// Reports returns what was found to be wrong so far, a sentence each, and the
// NCCL groups that are open now.
func (m *Machine) Reports() []string {
	m.mu.Lock()
	reports := slices.Clone(m.reports)
	m.mu.Unlock()
	return append(reports, m.nccl.openGroups()...)
}

// Explain says why the device was lost, or "" when it was not.
func (m *Machine) Explain(d cudadrv.Device) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if dev := m.device(d); dev != nil {
		return dev.why
	}
	return ""
}

// report adds a sentence to Reports. m.mu is held.
func (m *Machine) report(text string) { m.reports = append(m.reports, text) }

// handle makes a number that was never a handle before. m.mu is held.
func (m *Machine) handle() uintptr {
	m.lastHandle += 16
	return m.lastHandle
}

func (m *Machine) device(d cudadrv.Device) *device {
	if d < 0 || int(d) >= len(m.devices) {
		return nil
	}
	return m.devices[d]
}

// A device is one virtual GPU with its primary context.
type device struct {
	m         *Machine
	ordinal   int32
	uuid      cudadrv.UUID
	context   cudadrv.Context
	pool      *pool // the default one
	retained  int
	waiting   int     // launches that wait for room on a stream
	legacy    *stream // the one of handle 0, once it was used
	ended     []*mark // at the end of streams that were destroyed
	profiling bool    // cuProfilerStart was called, and cuProfilerStop was not

	arena arena
	peers [maxDevices]bool // whose cuMemAlloc memory this device may use

	status cudadrv.Result // the sticky error
	why    string
	lost   chan struct{} // closed once status is set
}

func newDevice(m *Machine, ordinal int32, host string) *device {
	sum := sha256.Sum256(fmt.Appendf(nil, "chorus virtual device %d of %s", ordinal, host))
	d := &device{
		m: m, ordinal: ordinal, uuid: cudadrv.UUID(sum[:16]), context: cudadrv.Context(m.handle()),
		arena: newArena(ordinal), lost: make(chan struct{}),
	}
	d.pool = d.newPool()
	return d
}

// lose makes status the device's sticky error. The first reason stays. m.mu is
// held.
func (d *device) lose(status cudadrv.Result, why string) {
	if d.status != cudadrv.Success {
		return
	}
	d.status = status
	d.why = fmt.Sprintf("virtual device %d: %s (seed %#x)", d.ordinal, why, d.m.seed)
	close(d.lost)
}

func (d *device) busID() string { return fmt.Sprintf("0000:%02x:00.0", 0x10+d.ordinal) }
