package machine

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

const maxDevices = 64

// Config describes a machine. The zero value of a field other than Devices
// selects its default.
type Config struct {
	Devices  int      // 1 to 64
	Seed     uint64   // seed of the streams' delays; 0 selects a random seed
	SMs      int      // multiprocessors of each device; 132
	Memory   uintptr  // bytes of each device, only counted, not reserved; 8 GiB
	Faults   string   // a fault plan: call#n=status, hang@call#n, lose@call#n, short@call#n, separated by commas
	Blocking bool     // the host waits for each kernel, copy and fill, as with CUDA_LAUNCH_BLOCKING
	Host     string   // host name for the UUIDs; "" is the identity of this host
	PCIe     [][2]int // pairs of devices connected by PCIe; all others are connected by NVLink
	// Queues is the number of hardware queues of each device that its streams share
	// (CUDA_DEVICE_MAX_CONNECTIONS); 8.
	Queues int
	// Hang is how long a wait may last without progress of any device until it is reported as a
	// deadlock; one minute.
	Hang time.Duration
}

// A Machine is a set of virtual devices. It does not need to be closed: all its
// resources belong to streams, events, memory and communicators.
type Machine struct {
	cfg     Config
	seed    uint64
	faults  faultPlan
	threads threads
	images  images

	// mu guards all fields below, and the state of devices, streams, events and
	// blocks. It is held for bookkeeping only, never while data moves.
	mu           sync.Mutex
	room         sync.Cond // signalled when a stream with a full queue has run an operation
	initialized  bool
	devices      []*Device
	streams      map[cudadrv.Stream]*Stream
	working      map[*Stream]struct{} // streams with a goroutine, also those of graphs
	progress     uint64               // number of operations that have ended, without marks and waits
	events       map[cudadrv.Event]*event
	modules      map[cudadrv.Module]*module
	functions    map[cudadrv.Function]*function
	pinned       []*Block // page-locked host memory, by address
	pools        map[cudadrv.MemPool]*pool
	physicals    map[cudadrv.MemHandle]*physical
	opened       map[openedKey]*opened
	id           uint64 // unique among the machines of all processes
	lastHandle   uintptr
	graphs       map[cudadrv.Graph]*graph
	execs        map[cudadrv.GraphExec]*graphExec
	objects      map[cudadrv.UserObject]*userObject
	captures     []*Capture // captures in progress
	lastCapture  uint64
	captureModes map[uintptr]cudadrv.CaptureMode // modes of OS threads that changed them
	slots        sanitizer.Slots
	ticks        uint64          // numbers captured operations and allocations of allocators in their order
	host         sanitizer.Clock // the host's clock: operations that it has waited for
	reports      []string
	reporters    []func() []string // of libraries
}

// New creates a machine, and fails only if the configuration is invalid.
func New(cfg *Config) (*Machine, error) {
	m := &Machine{
		streams:      map[cudadrv.Stream]*Stream{},
		working:      map[*Stream]struct{}{},
		events:       map[cudadrv.Event]*event{},
		modules:      map[cudadrv.Module]*module{},
		functions:    map[cudadrv.Function]*function{},
		graphs:       map[cudadrv.Graph]*graph{},
		execs:        map[cudadrv.GraphExec]*graphExec{},
		objects:      map[cudadrv.UserObject]*userObject{},
		captureModes: map[uintptr]cudadrv.CaptureMode{},
		pools:        map[cudadrv.MemPool]*pool{},
		physicals:    map[cudadrv.MemHandle]*physical{},
		opened:       map[openedKey]*opened{},
		id:           rand.Uint64(),
		lastHandle:   0x5000,
	}
	m.room.L = &m.mu
	m.cfg = *cmp.Or(cfg, new(Config))
	if err := m.configure(); err != nil {
		return nil, err
	}
	for i := range m.cfg.Devices {
		m.devices = append(m.devices, newDevice(m, int32(i), m.cfg.Host))
	}
	return m, nil
}

// tick returns the number of the next captured operation or allocation. m.mu is held.
func (m *Machine) tick() uint64 {
	m.ticks++
	return m.ticks
}

// configure validates the configuration and replaces zero values by their meaning.
func (m *Machine) configure() error {
	if m.cfg.Devices < 1 || m.cfg.Devices > maxDevices {
		return fmt.Errorf("virtual: %d devices: want 1 to %d", m.cfg.Devices, maxDevices)
	}
	if m.cfg.SMs <= 0 {
		m.cfg.SMs = 132
	}
	if m.cfg.Queues == 0 {
		m.cfg.Queues = 8
	}
	if m.cfg.Queues < 1 || m.cfg.Queues > maxQueues {
		return fmt.Errorf("virtual: %d hardware queues: want 1 to %d", m.cfg.Queues, maxQueues)
	}
	if m.cfg.Hang <= 0 {
		m.cfg.Hang = time.Minute
	}
	if m.cfg.Memory == 0 {
		m.cfg.Memory = 8 << 30
	}
	for m.seed = m.cfg.Seed; m.seed == 0; {
		m.seed = rand.Uint64()
	}
	if m.cfg.Host == "" {
		m.cfg.Host = hostIdentity()
	}
	return m.faults.Parse(m.cfg.Faults)
}

// hostIdentity identifies the host for the UUIDs of its devices. Hosts may have the same name, so it also has
// what differs between machines, and between network namespaces, which tests use as hosts.
func hostIdentity() string {
	name, _ := os.Hostname() // each part may be empty
	id, _ := os.ReadFile("/etc/machine-id")
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	network, _ := os.Readlink("/proc/self/ns/net")
	return fmt.Sprintf("%s %s %s %s", name, id, boot, network)
}

// Driver returns the machine's CUDA driver.
func (m *Machine) Driver() cudadrv.Driver {
	if m.cfg.Blocking {
		return blocking{driver{m}}
	}
	return driver{m}
}

// CountCalls starts counting library calls by their C names and replaces a
// count in progress; stop ends the count and returns it.
func (m *Machine) CountCalls() (stop func() map[string]int) { return m.faults.CountCalls() }

// HangNext lets the next library call with a C name hang.
func (m *Machine) HangNext(name string) { m.faults.HangNext(name) }

// EndHangs ends the calls and operations that hang by the fault plan or HangNext.
func (m *Machine) EndHangs() { m.faults.EndHangs() }

// Seed returns the seed of the streams' delays.
func (m *Machine) Seed() uint64 { return m.seed }

// Reports returns the mistakes found so far, one sentence each, and the mistakes that the
// libraries find now.
func (m *Machine) Reports() []string {
	m.mu.Lock()
	reports, more := slices.Clone(m.reports), m.reporters
	m.mu.Unlock()
	for _, f := range more {
		reports = append(reports, f()...)
	}
	return reports
}

// Explain returns the reason for the loss of the device, or "" if it is not lost.
func (m *Machine) Explain(d cudadrv.Device) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if dev := m.Device(d); dev != nil {
		return dev.why
	}
	return ""
}

// Report adds a sentence to Reports. m.mu is held.
func (m *Machine) Report(text string) { m.reports = append(m.reports, text) }

// Handle returns a number that was never used as a handle. m.mu is held.
func (m *Machine) Handle() uintptr {
	m.lastHandle += 16
	return m.lastHandle
}

func (m *Machine) Device(d cudadrv.Device) *Device {
	if d < 0 || int(d) >= len(m.devices) {
		return nil
	}
	return m.devices[d]
}

// A Device is one virtual GPU with its primary context.
type Device struct {
	m         *Machine
	ordinal   int32
	uuid      cudadrv.UUID
	context   cudadrv.Context
	pool      *pool // the default pool
	retained  int
	waiting   int     // launches that wait for space on a stream
	legacy    *Stream // the stream of handle 0, after its first use
	ended     []*Mark // final marks of destroyed streams
	profiling bool    // between cuProfilerStart and cuProfilerStop

	// collectives is the number of running collectives. Their kernels occupy multiprocessors, so
	// that a cooperative grid that needs all of them waits for collectivesEnd.
	collectives    int
	collectivesEnd chan struct{} // closed when there are none; nil if nothing waits

	valueWaits    int           // waits of streams for words of memory
	valueWaitsEnd chan struct{} // closed when one ends; nil if nothing waits

	queues map[int32][]hardwareQueue // by priority; see hardwareQueue
	// hostThread is empty while a host function runs: CUDA runs all host functions of a context
	// on one thread.
	hostThread chan struct{}

	arena arena
	peers [maxDevices]bool // devices whose cuMemAlloc memory this device may use

	status cudadrv.Result // the sticky error
	why    string
	lost   chan struct{} // closed when status is set
}

func newDevice(m *Machine, ordinal int32, host string) *Device {
	sum := sha256.Sum256(fmt.Appendf(nil, "chorus virtual device %d of %s", ordinal, host))
	d := &Device{
		m: m, ordinal: ordinal, uuid: cudadrv.UUID(sum[:16]), context: cudadrv.Context(m.Handle()),
		arena: newArena(ordinal), lost: make(chan struct{}),
		queues: map[int32][]hardwareQueue{}, hostThread: make(chan struct{}, 1),
	}
	d.hostThread <- struct{}{}
	d.pool = d.newPool()
	return d
}

// lose sets the device's sticky error, unless it is already lost. m.mu is held.
func (d *Device) lose(status cudadrv.Result, why string) {
	if d.status != cudadrv.Success {
		return
	}
	d.status = status
	d.why = fmt.Sprintf("virtual device %d: %s (seed %#x)", d.ordinal, why, d.m.seed)
	close(d.lost)
}

func (d *Device) BusID() string { return fmt.Sprintf("0000:%02x:00.0", 0x10+d.ordinal) }
