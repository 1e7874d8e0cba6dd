package health

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/nvml"
)

// A world is a host with fakes. healthy returns one on which all checks pass.
type world struct {
	*Host
	files fstest.MapFS
	gpus  []*fakeGPU
	space space
	cuda  cudaStatus
	log   []logLine
	nics  []nic
	names map[string][]netip.Addr
}

const (
	gpu0, gpu1 = "0000:06:00.0", "0000:07:00.0"
	bridges    = "sys/devices/pci0000:00/0000:00:01.0/0000:04:00.0/0000:05:00.0"
	statusText = "Name:\tchorus\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-15\n"
	limitsText = `Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max processes             unlimited            unlimited            processes
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
`
)

// A fakeGPU has the values of a healthy H200. If err is set, all methods return it.
type fakeGPU struct {
	err              error
	id, name         string
	mig, migLater    bool
	mode             nvml.ComputeMode
	list             []nvml.Process
	used             uint64
	persistent       bool
	action           nvml.RecoveryAction
	rows             nvml.RemappedRows
	ecc, eccLater    bool
	uncorrected      uint64
	corrected        map[nvml.Memory]uint64
	links            []bool
	speed            int
	linkErrors       func(link int, c nvml.LinkCounter) uint64
	events           nvml.ClockEvents
	limit, usual     int
	replays          func() int
	fabric           nvml.Fabric
	noFabric         error
	utilization, mhz int
}

func (g *fakeGPU) Utilization() (gpu, memory int, err error)     { return g.utilization, 0, g.err }
func (g *fakeGPU) Temperature() (int, error)                     { return 40, g.err }
func (g *fakeGPU) Power() (int, error)                           { return 70000, g.err }
func (g *fakeGPU) SMClock() (int, error)                         { return g.mhz, g.err }
func (g *fakeGPU) MemoryUsed() (uint64, error)                   { return g.used, g.err }
func (g *fakeGPU) Processes() ([]nvml.Process, error)            { return g.list, g.err }
func (g *fakeGPU) NVLinks() ([]bool, error)                      { return g.links, g.err }
func (g *fakeGPU) Name() (string, error)                         { return g.name, g.err }
func (g *fakeGPU) PCIBusID() (string, error)                     { return g.id, g.err }
func (g *fakeGPU) Persistence() (bool, error)                    { return g.persistent, g.err }
func (g *fakeGPU) ComputeMode() (nvml.ComputeMode, error)        { return g.mode, g.err }
func (g *fakeGPU) MIGMode() (current, pending bool, err error)   { return g.mig, g.migLater, g.err }
func (g *fakeGPU) ECCMode() (current, pending bool, err error)   { return g.ecc, g.eccLater, g.err }
func (g *fakeGPU) ECCErrors(_, lifetime bool) (uint64, error)    { return g.uncorrected, g.err }
func (g *fakeGPU) CorrectedErrors(m nvml.Memory) (uint64, error) { return g.corrected[m], g.err }
func (g *fakeGPU) RemappedRows() (*nvml.RemappedRows, error)     { return &g.rows, g.err }
func (g *fakeGPU) ClockEvents() (nvml.ClockEvents, error)        { return g.events, g.err }
func (g *fakeGPU) PowerLimit() (int, error)                      { return g.limit, g.err }
func (g *fakeGPU) DefaultPowerLimit() (int, error)               { return g.usual, g.err }
func (g *fakeGPU) PCIeReplays() (int, error)                     { return g.replays(), g.err }
func (g *fakeGPU) NVLinkSpeed(int) (int, error)                  { return g.speed, g.err }
func (g *fakeGPU) NVLinkSent() (uint64, error)                   { return 0, g.err }
func (g *fakeGPU) RecoveryAction() (nvml.RecoveryAction, error)  { return g.action, g.err }
func (g *fakeGPU) Fabric() (*nvml.Fabric, error)                 { return &g.fabric, errors.Join(g.err, g.noFabric) }
func (g *fakeGPU) NVLinkErrors(link int, c nvml.LinkCounter) (uint64, error) {
	return g.linkErrors(link, c), g.err
}

func newFakeGPU(id string) *fakeGPU {
	links := make([]bool, 18)
	for i := range links {
		links[i] = true
	}
	return &fakeGPU{
		id: id, name: "NVIDIA H200", used: 4 << 20, persistent: true, ecc: true, eccLater: true, links: links, speed: 26562,
		linkErrors: func(int, nvml.LinkCounter) uint64 { return 0 }, limit: 700000, usual: 700000, replays: func() int { return 3 },
		fabric: nvml.Fabric{State: nvml.FabricCompleted, Health: 2 | 1<<8},
	}
}

// put writes a file, or a link if the text begins with "->".
func (w *world) put(name, text string) {
	if target, ok := strings.CutPrefix(text, "->"); ok {
		w.files[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
		return
	}
	w.files[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o644}
}

// remove removes the files with a prefix.
func (w *world) remove(prefix string) {
	for name := range w.files {
		if strings.HasPrefix(name, prefix) {
			delete(w.files, name)
		}
	}
}

// deny replaces a file by a folder, so that it cannot be read.
func (w *world) deny(name string) {
	w.remove(name)
	w.files[name] = &fstest.MapFile{Mode: fs.ModeNamedPipe | 0o644}
}

func healthy() *world {
	w := &world{files: fstest.MapFS{}, space: space{64 << 30, 64 << 30}, gpus: []*fakeGPU{newFakeGPU(gpu0), newFakeGPU(gpu1)},
		cuda:  cudaStatus{Path: "/usr/lib/libcuda.so.580.159.04", DMABuf: true},
		nics:  []nic{{"lo", 65536, true, prefixes("127.0.0.1/8")}, {"docker0", 1500, true, prefixes("172.17.0.1/16")}, {"ens3", 9000, true, prefixes("10.0.0.7/24")}},
		names: map[string][]netip.Addr{"node1": {netip.MustParseAddr("10.0.0.7")}}}
	for name, text := range map[string]string{
		"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-uvm-tools": "",
		"proc/driver/nvidia/version":                               "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: gcc 13.3.0\n",
		"proc/driver/nvidia/gpus/" + gpu0 + "/information":         "Model: NVIDIA H200",
		"proc/driver/nvidia/gpus/" + gpu1 + "/information":         "Model: NVIDIA H200",
		"proc/self/limits":                                         limitsText,
		"proc/self/status":                                         statusText,
		"proc/self/cgroup":                                         "0::/job\n",
		"proc/self/mountinfo":                                      "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /scratch rw - lustre mgs:/x rw\n",
		"proc/self/cmdline":                                        "chorus\x00doctor\x00",
		"proc/meminfo":                                             "MemTotal: 2097152000 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB\n",
		"proc/cpuinfo":                                             "flags : fpu vme\n",
		"proc/modules":                                             "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2 - Live 0x0\n",
		"sys/fs/cgroup/job/memory.max":                             "max\n",
		"sys/fs/cgroup/job/memory.events":                          "low 0\noom 0\noom_kill 0\n",
		"sys/fs/cgroup/job/cpu.max":                                "max 100000\n",
		"sys/fs/cgroup/job/pids.max":                               "max\n",
		"sys/fs/cgroup/cpu.stat":                                   "",
		"sys/devices/system/node/online":                           "0-1\n",
		"sys/class/net/ens3/mtu":                                   "9000\n",
		"sys/class/infiniband/mlx5_0/ports/1/state":                "4: ACTIVE\n",
		"sys/class/infiniband/mlx5_0/ports/1/phys_state":           "5: LinkUp\n",
		"sys/class/infiniband/mlx5_0/ports/1/rate":                 "400 Gb/sec (4X NDR)\n",
		"sys/class/infiniband/mlx5_1/ports/1/state":                "4: ACTIVE\n",
		"sys/class/infiniband/mlx5_1/ports/1/phys_state":           "5: LinkUp\n",
		"sys/class/infiniband/mlx5_1/ports/1/rate":                 "400 Gb/sec (4X NDR)\n",
		"sys/class/infiniband/mlx5_1/ports/1/counters/link_downed": "2\n",
	} {
		w.put(name, text)
	}
	w.putBridges()
	w.Host = &Host{
		Name: "node1", Local: "node1", Root: w.files, Env: map[string]string{"PWD": "/home/user", "HOME": "/home/user"},
		spaceOf:     func(string) (*space, error) { return &w.space, nil },
		writeSpeed:  func(context.Context, string) (float64, error) { return 2.3e9, nil },
		openDevice:  func(string) error { return nil },
		kernelLog:   func() ([]logLine, error) { return w.log, nil },
		clockStatus: func() (bool, error) { return true, nil },
		interfaces:  func() ([]nic, error) { return w.nics, nil },
		lookup: func(_ context.Context, name string) ([]netip.Addr, error) {
			if a, ok := w.names[name]; ok {
				return a, nil
			}
			return nil, errors.New("no such host " + name)
		},
		cuda: func() *cudaStatus { return &w.cuda },
		nccl: func() (*library, error) { return &library{"/usr/lib/libnccl.so.2.28.3", "2.28.3"}, nil },
		listGPUs: func() ([]*gpu, error) {
			list := make([]*gpu, len(w.gpus))
			for i, g := range w.gpus {
				list[i] = &gpu{Index: i, UUID: g.id, Device: g, Health: g}
			}
			return list, nil
		},
	}
	return w
}

// putBridges puts both GPUs below a switch with ports of 16 lanes.
func (w *world) putBridges() {
	for _, dir := range []string{"sys/devices/pci0000:00/0000:00:01.0", "sys/devices/pci0000:00/0000:00:01.0/0000:04:00.0", bridges, bridges + "/" + gpu0, bridges + "/" + gpu1} {
		w.put(dir+"/max_link_width", "16\n")
		w.put(dir+"/current_link_width", "16\n")
		w.put(dir+"/max_link_speed", "32.0 GT/s PCIe\n")
		w.put(dir+"/config", strings.Repeat("\x00", 4096))
	}
	for _, id := range []string{gpu0, gpu1} {
		dir := bridges + "/" + id
		w.put("sys/bus/pci/devices/"+id, "->../../../devices/"+strings.TrimPrefix(dir, "sys/devices/"))
		w.put(dir+"/vendor", "0x10de\n")
		w.put(dir+"/class", "0x030200\n")
		w.put(dir+"/numa_node", "0\n")
		w.put(dir+"/local_cpulist", "0-7\n")
		w.put(dir+"/iommu_group/type", "identity\n")
	}
}

// withoutGPU removes all traces of GPUs and their driver.
func (w *world) withoutGPU() {
	w.remove("dev/nvidia")
	w.remove("proc/driver/nvidia")
	w.remove("sys/bus/pci")
	w.remove("sys/devices/pci")
}

// runOne runs a check.
func (w *world) runOne(t *testing.T, c *Check) []Result {
	t.Helper()
	results := Run(t.Context(), w.Host, []*Check{c})
	for _, r := range results {
		require.Equal(t, c.ID, r.ID)
		require.NotEmpty(t, r.Source)
		if r.Verdict == Warn || r.Verdict == Fail {
			require.NotEmpty(t, r.Found)
			require.NotEmpty(t, r.Want)
			require.NotEmpty(t, r.Cause)
			require.NotEmpty(t, r.Cure)
		}
	}
	return results
}

// A change makes a host of a test.
type change struct {
	name string
	make func(w *world)
	want Verdict
	text string // part of the evidence or the reason
}

// try runs a check on a healthy host, which passes, and after each change.
func try(t *testing.T, c *Check, changes ...change) {
	t.Helper()
	for _, r := range healthy().runOne(t, c) {
		require.Equal(t, Pass, r.Verdict, "healthy: %+v", r)
	}
	for _, x := range changes {
		w := healthy()
		x.make(w)
		r := w.runOne(t, c)[0]
		require.Equal(t, x.want, r.Verdict, "%s: %+v", x.name, r)
		require.Contains(t, r.Found+" "+r.Want+" "+r.Cause+" "+r.Cure, x.text, x.name)
	}
}

// lost is the error of a GPU that does not answer.
var lost = change{"a lost GPU", func(w *world) { w.gpus[0].err = errors.New("GPU is lost") }, Unknown, "GPU is lost"}

// noGPU is a host without a GPU.
var noGPU = change{"no GPU", (*world).withoutGPU, Unknown, "this host has no NVIDIA GPU"}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}
