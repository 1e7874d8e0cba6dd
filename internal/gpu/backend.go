package gpu

import (
	"cmp"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/nvml"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/nccl"
)

// The backends, with the values of CHORUS_BACKEND. Auto means CUDA or an error:
// the library never selects virtual devices silently.
const (
	Auto    = "auto"
	CUDA    = "cuda"
	Virtual = "virtual"
)

// MaxVirtualDevices is the maximum number of virtual devices.
const MaxVirtualDevices = 64

// A Backend is a set of devices and the libraries that control them. Libraries
// other than the driver are opened at their first use.
type Backend struct {
	Name    string
	Driver  cudadrv.Driver
	Machine *VirtualMachine // nil on CUDA

	Sanitizer *sanitizer.Sanitizer // nil unless CHORUS_SANITIZER is 1
	Sensors   nvml.API             // instead of NVML or of the machine's; nil except in tests
}

// BackendConfig selects a Backend. Nil and zero fields take their values from the
// environment.
type BackendConfig struct {
	Backend string
	Devices int    // virtual devices
	Seed    uint64 // seed of virtual devices' delays
	Faults  string // fault plan of virtual devices

	Multiprocessors int      // of each virtual device; 0 means 132, as on an H200
	NCCL            string   // version of the virtual NCCL
	PCIe            [][2]int // pairs of virtual devices connected by PCIe instead of NVLink
}

// OpenBackend initializes the driver of the backend.
func OpenBackend(cfg *BackendConfig) (*Backend, error) {
	c := *cmp.Or(cfg, new(BackendConfig))
	if c.Backend == "" {
		b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
		if err != nil {
			return nil, err
		}
		c.Backend = b
	}
	switch c.Backend {
	case Virtual:
		return openVirtualBackend(&c)
	case CUDA:
		return openCUDABackend()
	case Auto:
		s, err := openCUDABackend()
		if err != nil {
			err = fmt.Errorf("%w\n%s=%s selects virtual devices", err, env.Backend.Name, Virtual)
		}
		return s, err
	}
	return nil, fmt.Errorf("backend: unknown backend %q: want %s, %s or %s", c.Backend, Auto, CUDA, Virtual)
}

func openVirtualBackend(c *BackendConfig) (*Backend, error) {
	if err := c.fillFromEnv(); err != nil {
		return nil, err
	}
	version, err := ncclapi.ParseVersion(c.NCCL)
	if err != nil {
		return nil, &env.ValueError{Name: env.VirtualNCCL.Name, Value: c.NCCL, Want: err.Error()}
	}
	network, err := network()
	if err != nil {
		return nil, err
	}
	hang, err := env.VirtualHang.Duration()
	if err != nil {
		return nil, err
	}
	queues, err := env.MaxConnections.Int()
	if err != nil {
		return nil, err
	}
	m, err := NewVirtual(&VirtualConfig{
		Config: machine.Config{Devices: c.Devices, Seed: c.Seed, Faults: c.Faults, SMs: c.Multiprocessors, PCIe: c.PCIe,
			Host: env.HostName.Value(), Blocking: env.LaunchBlocking.Value() == "1",
			Hang: hang, Queues: min(max(queues, 1), 32)},
		NCCL: nccl.Config{Version: version, Network: network},
	})
	if err != nil {
		return nil, err
	}
	s := &Backend{Name: Virtual, Driver: m.Driver(), Machine: m}
	return s, s.init()
}

// network returns the network of virtual ranks: an IP address, nccl.InProcess, or "" for Unix sockets, which
// work only within one host.
func network() (string, error) {
	ip := env.VirtualNetwork.Value()
	if ip == nccl.InProcess {
		return ip, nil
	}
	if _, err := netip.ParseAddr(ip); ip != "" && err != nil {
		return "", &env.ValueError{Name: env.VirtualNetwork.Name, Value: ip, Want: "an IP address of this host, or process"}
	}
	if ip != "" || !severalHosts() {
		return ip, nil
	}
	return rankAddress(env.Addr.Value(), net.InterfaceAddrs), nil
}

// severalHosts reports whether the launcher has started processes on several hosts.
func severalHosts() bool {
	if n := env.Nodes.Value(); n != "" {
		return n != "1"
	}
	n := cmp.Or(os.Getenv("SLURM_STEP_NUM_NODES"), os.Getenv("SLURM_NNODES"))
	return n != "" && n != "1" || os.Getenv("OMPI_COMM_WORLD_SIZE") != os.Getenv("OMPI_COMM_WORLD_LOCAL_SIZE")
}

// rankAddress returns the IP address of this host for ranks on other hosts: the local address of the route
// to the coordinator, or "" if there is none. On the coordinator's own host its name may mean the loopback,
// which other hosts cannot reach, so rankAddress then returns an address of an interface. If the
// coordinator is given as 127.0.0.1 or ::1, all processes run on this machine.
func rankAddress(coordinator string, interfaces func() ([]net.Addr, error)) string {
	local := ""
	// Dialing UDP sends nothing: it only selects the local address of the route.
	if way, err := net.Dial("udp", coordinator); err == nil {
		defer way.Close()
		ip := way.LocalAddr().(*net.UDPAddr).IP
		local = ip.String()
		host, _, _ := net.SplitHostPort(coordinator)
		if !ip.IsLoopback() || host == "127.0.0.1" || host == "::1" {
			return local
		}
	}
	addrs, _ := interfaces()
	for _, v4 := range []bool{true, false} {
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && (n.IP.To4() != nil) == v4 {
				return n.IP.String()
			}
		}
	}
	return local
}

func (c *BackendConfig) fillFromEnv() (err error) {
	if c.Devices == 0 {
		want := fmt.Sprintf("a whole number from 1 to %d", MaxVirtualDevices)
		if c.Devices, err = env.VirtualDevices.IntWhere(want, func(n int) bool { return n >= 1 && n <= MaxVirtualDevices }); err != nil {
			return err
		}
	}
	if c.Seed == 0 && env.VirtualSeed.Value() != "" {
		if c.Seed, err = env.VirtualSeed.Uint64(); err != nil {
			return err
		}
	}
	if c.NCCL == "" {
		c.NCCL = env.VirtualNCCL.Value()
	}
	if c.Faults == "" {
		c.Faults = env.VirtualFaults.Value()
	}
	return nil
}

func openCUDABackend() (*Backend, error) {
	drv, err := cudadrv.Open()
	if err != nil {
		return nil, fmt.Errorf("CUDA is not available on this machine: %w", err)
	}
	s := &Backend{Name: CUDA, Driver: drv}
	if err := s.init(); err != nil {
		return nil, fmt.Errorf("CUDA is not available on this machine: %w", err)
	}
	return s, nil
}

func (s *Backend) init() error {
	if r := s.Driver.Init(); r != cudadrv.Success {
		return fmt.Errorf("cuInit: %w (%s)", r, r.Meaning())
	}
	on, err := env.Sanitizer.OneOf("0", "1")
	if err == nil && !env.Sanitizer.IsSet() && s.Machine != nil && flag.Lookup("test.v") != nil {
		on = "1" // in a test, lines in reports are worth the time
	}
	if err != nil || on == "0" {
		return err
	}
	s.Sanitizer = sanitizer.New(s.Driver)
	s.Driver = s.Sanitizer.Driver()
	return nil
}

// NCCL opens NCCL at its first use.
func (s *Backend) NCCL() (ncclapi.API, error) {
	api, err := s.plainNCCL()
	if err == nil && s.Sanitizer != nil {
		api = s.Sanitizer.NCCL(api)
	}
	return api, err
}

func (s *Backend) plainNCCL() (ncclapi.API, error) {
	if s.Machine != nil {
		return s.Machine.NCCL(), nil
	}
	return library[ncclapi.API](ncclapi.Open)
}

// library opens a library of CUDA, which implements A. If that fails, the result is a nil interface.
func library[A, L any](open func() (L, error)) (api A, err error) {
	lib, err := open()
	if err != nil {
		return api, err
	}
	return any(lib).(A), nil
}

// CUBLAS opens cuBLAS at its first use.
func (s *Backend) CUBLAS() (cublasapi.API, error) {
	if s.Machine != nil {
		return s.Machine.CUBLAS(), nil
	}
	return library[cublasapi.API](cublasapi.Open)
}

// CUBLASLt opens cuBLASLt at its first use.
func (s *Backend) CUBLASLt() (cublasapi.LtAPI, error) {
	if s.Machine != nil {
		return s.Machine.CUBLASLt(), nil
	}
	return library[cublasapi.LtAPI](cublasapi.OpenLt)
}

// CuFile opens cuFile at its first use, without opening cuFile's driver or
// setting parameters.
func (s *Backend) CuFile() (cufileapi.API, error) {
	api, err := s.plainCuFile()
	if err == nil && s.Sanitizer != nil {
		api = s.Sanitizer.CuFile(api)
	}
	return api, err
}

func (s *Backend) plainCuFile() (cufileapi.API, error) {
	if s.Machine != nil {
		return s.Machine.CuFile(), nil
	}
	return library[cufileapi.API](cufileapi.Open)
}

// NVML opens NVML at its first use.
func (s *Backend) NVML() (nvml.API, error) {
	if s.Sensors != nil {
		return s.Sensors, nil
	}
	if s.Machine != nil {
		return s.Machine.NVML(), nil
	}
	return nvml.Open()
}

// NVRTC opens NVRTC at its first use. It is the same for virtual devices, which check with it
// what a GPU would refuse; package kernel passes the stand-ins of kernels to Machine.
func (s *Backend) NVRTC() (cudacc.NVRTC, error) {
	return library[cudacc.NVRTC](cudacc.OpenNVRTC)
}

// Explain returns the cause of a virtual device's sticky error. It returns "" on
// CUDA, because the cause is unknown.
func (s *Backend) Explain(d cudadrv.Device) string {
	if s.Machine == nil {
		return ""
	}
	return s.Machine.Explain(d)
}

// A BackendChoice is the backend for a program that may fall back to virtual devices,
// such as `chorus` and the examples.
type BackendChoice struct {
	Backend string
	Devices int    // number of devices that a process will see
	NoGPU   string // the reason for a fallback to virtual devices, or ""
}

// Note returns the line that tells the user of a fallback to devices, such as
// "4 virtual devices", or "".
func (c *BackendChoice) Note(devices string) string {
	if c.NoGPU == "" {
		return ""
	}
	return fmt.Sprintf("no GPU on this machine (%s): running on %s in host memory instead; set %s=cuda to require a GPU",
		c.NoGPU, devices, env.Backend.Name)
}

// ChooseBackend counts the device files of the kernel driver. It does not start the CUDA
// driver, so a launcher that must not use a GPU can call it.
func ChooseBackend() (*BackendChoice, error) {
	b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
	if err != nil {
		return nil, err
	}
	files := deviceFiles()
	gpus := countVisible(len(files))
	switch {
	case b != Virtual && gpus > 0:
		return &BackendChoice{Backend: CUDA, Devices: gpus}, nil
	case b == CUDA:
		return nil, &NoGPUError{Reason: whyNoGPU(files)}
	}
	var c BackendConfig
	if err := c.fillFromEnv(); err != nil {
		return nil, err
	}
	choice := &BackendChoice{Backend: Virtual, Devices: c.Devices}
	if b == Auto {
		choice.NoGPU = whyNoGPU(files)
	}
	return choice, nil
}

// A NoGPUError reports that CUDA was requested on a machine without a GPU.
type NoGPUError struct{ Reason string }

func (e *NoGPUError) Error() string {
	return fmt.Sprintf("no GPU on this machine (%s), and %s=cuda requires one: install the NVIDIA driver, or use %[2]s=virtual",
		e.Reason, env.Backend.Name)
}

// deviceFiles returns the device files of the GPUs.
func deviceFiles() []string {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is valid
	return files
}

func whyNoGPU(files []string) string {
	if len(files) == 0 {
		return "no /dev/nvidia*"
	}
	return fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", env.VisibleDevices.Value())
}

// countVisible returns how many of have GPUs CUDA_VISIBLE_DEVICES selects. It
// assumes that UUIDs are valid, because only NVML or the driver could check them.
func countVisible(have int) int {
	if !env.VisibleDevices.IsSet() {
		return have
	}
	v := parseVisible(env.VisibleDevices.Value())
	return min(len(v.uuids)+len(within(v.ordinals, have)), have)
}

// A VirtualMachine is a machine of virtual devices with its libraries.
type VirtualMachine struct {
	*machine.Machine
	nccl   ncclapi.API
	cublas cublasapi.API
	lt     cublasapi.LtAPI
	cufile cufileapi.API
}

// A VirtualConfig describes a machine and its NCCL.
type VirtualConfig struct {
	machine.Config
	NCCL nccl.Config
}

// NewVirtual creates a machine, and fails only if the configuration is invalid.
func NewVirtual(cfg *VirtualConfig) (*VirtualMachine, error) {
	m, err := machine.New(&cfg.Config)
	if err != nil {
		return nil, err
	}
	return &VirtualMachine{Machine: m, nccl: nccl.New(m, cfg.NCCL), cublas: machine.NewCublas(m), lt: machine.NewCublasLt(m), cufile: machine.NewCufile(m)}, nil
}

// NCCL returns the machine's NCCL, of the configured version.
func (m *VirtualMachine) NCCL() ncclapi.API { return m.nccl }

// CUBLAS returns the machine's cuBLAS.
func (m *VirtualMachine) CUBLAS() cublasapi.API { return m.cublas }

// CUBLASLt returns the machine's cuBLASLt, version 13.0.2.
func (m *VirtualMachine) CUBLASLt() cublasapi.LtAPI { return m.lt }

// CuFile returns the machine's cuFile, version 1.15.
func (m *VirtualMachine) CuFile() cufileapi.API { return m.cufile }

// A visible is a parsed value of CUDA_VISIBLE_DEVICES: ordinals or UUIDs, in
// order.
type visible struct {
	ordinals []int
	uuids    []string // GPU-… or MIG-…, possibly only prefixes
}

// parseVisible parses a list as the driver does: an invalid entry ends the
// list, and a duplicate makes it empty.
func parseVisible(list string) visible {
	for _, prefix := range []string{"GPU-", "MIG-"} {
		if strings.HasPrefix(list, prefix) {
			return visible{uuids: entries(list, func(e string) (string, bool) { return e, strings.HasPrefix(e, prefix) })}
		}
	}
	return visible{ordinals: entries(list, func(e string) (int, bool) { return strtoul(strings.TrimSpace(e)) })}
}

func entries[T comparable](list string, read func(string) (T, bool)) (out []T) {
	for e := range strings.SplitSeq(list, ",") {
		v, ok := read(e)
		if ok && slices.Contains(out, v) {
			return nil
		}
		if !ok {
			break
		}
		out = append(out, v)
	}
	return out
}

// strtoul parses a leading number like the C function: "2ampere" is 2, and "-0"
// is 0.
func strtoul(text string) (int, bool) {
	digits := strings.TrimPrefix(text, "+")
	if digits == text {
		digits = strings.TrimPrefix(text, "-")
	}
	sign := len(text) - len(digits)
	if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		text = text[:sign+end]
	}
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0
}

// resolve returns the ordinals of the GPUs with the UUIDs. An entry that matches
// no UUID, or several, ends the list. Two entries for the same GPU make it empty.
func resolve(entries, uuids []string) (out []int) {
	for _, e := range entries {
		var match []int
		for i, u := range uuids {
			if strings.HasPrefix(u, e) {
				match = append(match, i)
			}
		}
		if len(match) != 1 {
			return out
		}
		if slices.Contains(out, match[0]) {
			return nil
		}
		out = append(out, match[0])
	}
	return out
}

// within truncates the list at the first ordinal without a GPU.
func within(ordinals []int, have int) []int {
	if i := slices.IndexFunc(ordinals, func(o int) bool { return o >= have }); i >= 0 {
		return ordinals[:i]
	}
	return ordinals
}

// CountDevices returns the number of devices that OpenBackend would find with
// the present environment. It uses NVML, which does not start the driver, and
// the driver only if NVML cannot tell. Neither creates a context.
func CountDevices() (int, error) {
	b, err := env.Backend.OneOf(Auto, CUDA, Virtual)
	if err != nil {
		return 0, err
	}
	if b == Virtual {
		var c BackendConfig
		err := c.fillFromEnv()
		return c.Devices, err
	}
	if env.NVMLCheck.Value() != "0" {
		if api, err := nvml.Open(); err == nil {
			if n, ok := countNVML(api); ok {
				return n, nil
			}
		}
	}
	s, err := openCUDABackend()
	if err != nil {
		return 0, err
	}
	n, r := s.Driver.DeviceGetCount()
	if r != cudadrv.Success {
		return 0, r
	}
	return int(n), nil
}

// countNVML returns ok = false with MIG, because NVML and CUDA then count differently.
func countNVML(api nvml.API) (n int, ok bool) {
	uuids, err := api.UUIDs()
	if err != nil {
		return 0, false
	}
	if mig, err := api.MIG(); err != nil || mig {
		return 0, false
	}
	if !env.VisibleDevices.IsSet() {
		return len(uuids), true
	}
	v := parseVisible(env.VisibleDevices.Value())
	if len(v.uuids) > 0 {
		return len(resolve(v.uuids, uuids)), !strings.HasPrefix(v.uuids[0], "MIG-")
	}
	return len(within(v.ordinals, len(uuids))), true
}
