package health

import (
	"errors"
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func TestRdmaPort(t *testing.T) {
	try(t, rdmaPort,
		change{"down", func(w *world) { w.put(port0+"state", "1: DOWN"); w.put(port0+"phys_state", "2: Polling") }, Fail, "mlx5_0:1 is 1: DOWN"},
		change{"disabled", func(w *world) { w.put(port0+"state", "1: DOWN"); w.put(port0+"phys_state", "3: Disabled") }, Pass, "Disabled"},
		change{"slow", func(w *world) { w.put(port0+"rate", "200 Gb/sec (2X NDR)") }, Fail, "the rate of 400 Gb/sec"},
		change{"no state", func(w *world) { w.remove(port0 + "state") }, Unknown, "state"},
		change{"no device", func(w *world) { w.remove("sys/class/infiniband") }, Pass, "no RDMA device"},
		change{"no sysfs", func(w *world) { w.remove("sys/class") }, Unknown, "/sys/class/net"},
	)
}

const port0 = "sys/class/infiniband/mlx5_0/ports/1/"

// New errors of a port between two readings are a warning.
func TestRDMAErrorsGrow(t *testing.T) {
	w := healthy()
	w.put("sys/class/infiniband/mlx5_1/ports/1/hw_counters/packet_seq_err", "5")
	w.Root = growing{w.Root}
	results := w.runOne(t, rdmaPort)
	require.Equal(t, []Verdict{Pass, Warn}, []Verdict{results[0].Verdict, results[1].Verdict})
	require.Contains(t, results[1].Found, "mlx5_1:1 has 1 new errors")
}

// growing is a file system whose counter of errors has another value after the first reading.
type growing struct{ fs.FS }

func (g growing) Open(name string) (fs.File, error) {
	f, err := g.FS.Open(name)
	if m := g.FS.(fstest.MapFS); strings.HasSuffix(name, "packet_seq_err") && err == nil {
		m[name] = &fstest.MapFile{Data: []byte("6")}
	}
	return f, err
}

func TestGdr(t *testing.T) {
	try(t, gdr,
		noGPU,
		change{"neither", func(w *world) { w.put("proc/modules", "nvidia 1 2 - Live 0x0\n"); w.cuda.DMABuf = false }, Warn, "nvidia-peermem"},
		change{"DMA buffers", func(w *world) { w.put("proc/modules", "") }, Pass, "DMA buffers"},
		change{"no RDMA", func(w *world) { w.put("proc/modules", ""); w.cuda.DMABuf = false; w.remove("sys/class/infiniband") }, Pass, "no RDMA device"},
		change{"no CUDA", func(w *world) { w.put("proc/modules", ""); w.cuda = cudaStatus{Err: errors.New("no usable library")} }, Unknown, "no usable library"},
		change{"no modules", func(w *world) { w.remove("proc/modules") }, Unknown, "/proc/modules"},
	)
}

func TestIfname(t *testing.T) {
	try(t, ifname,
		change{"no match", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "eth" }, Fail, "NCCL_SOCKET_IFNAME==ens3"},
		change{"a prefix", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "eth,ens" }, Pass, "ens3"},
		change{"an exact name", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "=ens" }, Fail, "none of"},
		change{"an exclusion", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "^ens,lo" }, Warn, "NCCL uses docker0"},
		change{"InfiniBand first", func(w *world) { w.nics = append(w.nics, nic{"ib0", 2044, true, prefixes("10.1.0.7/24")}) }, Pass, "NCCL uses ib0"},
		change{"down", func(w *world) { w.nics[2].Up = false }, Warn, "NCCL uses docker0"},
		change{"no address of the network", func(w *world) { w.nics[2].Addrs = prefixes("169.254.0.7/16") }, Warn, "169.254.0.7/16"},
		change{"no interface", func(w *world) { w.nics = nil }, Fail, "no interface"},
		change{"refused", func(w *world) { w.interfaces = func() ([]nic, error) { return nil, errors.New("no netlink") } }, Unknown, "no netlink"},
	)
}

func TestHostname(t *testing.T) {
	try(t, hostname,
		change{"Debian", func(w *world) { w.names["node1"] = loop; w.Env["CHORUS_SEEDS"] = "node0:29477"; w.names["node0"] = far }, Warn, "node1 is 127.0.1.1"},
		change{"Debian alone", func(w *world) { w.names["node1"] = loop }, Pass, "must not use as a seed"},
		change{"a seed on the loopback", func(w *world) { w.names["node1"] = loop; w.Env["CHORUS_SEEDS"] = "node1" }, Fail, "the seed node1 is 127.0.1.1"},
		change{"an unknown seed", func(w *world) { w.Env["CHORUS_SEEDS"] = "node7:1, node1" }, Fail, "the seed node7"},
		change{"an unknown name", func(w *world) { w.names = nil }, Unknown, "no such host"},
	)
}

var (
	loop = []netip.Addr{netip.MustParseAddr("127.0.1.1")}
	far  = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
)

func TestShm(t *testing.T) {
	try(t, shm,
		change{"Docker's default", func(w *world) { w.space = space{64 << 20, 64 << 20} }, Fail, "--shm-size=1g"},
		change{"one rank", func(w *world) { w.space = space{64 << 20, 64 << 20}; w.Ranks = 1 }, Warn, "64 MiB"},
		change{"small", func(w *world) { w.space = space{512 << 20, 512 << 20} }, Warn, "512 MiB"},
		change{"full", func(w *world) { w.space.Free = 1 << 20 }, Warn, "1 MiB free"},
		change{"no folder", func(w *world) { w.spaceOf = func(string) (*space, error) { return nil, fs.ErrNotExist } }, Unknown, "not exist"},
	)
}

func TestHostCopies(t *testing.T) {
	good := Copy{Product: "NVIDIA H200", ToGPU: 55, FromGPU: 55}
	for _, x := range []struct {
		name string
		last Copy
		want Verdict
		text string
	}{
		{"healthy", good, Pass, "55.0 GB/s to the GPU"},
		{"slow one way", Copy{Product: "NVIDIA H200", ToGPU: 55, FromGPU: 30}, Fail, "30.0 GB/s from it"},
		{"slower than the others", Copy{Product: "NVIDIA L4", ToGPU: 20, FromGPU: 20}, Fail, "44 GB/s"},
		{"not measured", Copy{Missing: "no memory"}, Unknown, "no memory"},
		{"virtual", Copy{OnlyMemory: true, ToGPU: 1, FromGPU: 1}, Unknown, "virtual devices"},
	} {
		w := healthy()
		w.Measured = &Measured{Copies: []Copy{good, good, x.last}}
		r := w.runOne(t, hostCopies)
		require.Len(t, r, 3)
		require.Equal(t, Pass, r[0].Verdict, x.name)
		require.Equal(t, x.want, r[2].Verdict, x.name)
		require.Contains(t, r[2].Found+r[2].Want+r[2].Cause, x.text, x.name)
	}
	w := healthy()
	w.Measured = &Measured{Copies: []Copy{{Product: "NVIDIA L4", ToGPU: 12, FromGPU: 12}}}
	require.Equal(t, Unknown, w.runOne(t, hostCopies)[0].Verdict, "one GPU without a reference")
	w.Measured.Copies[0].Product = "NVIDIA H100 80GB HBM3"
	require.Equal(t, Fail, w.runOne(t, hostCopies)[0].Verdict)
	w.Measured = nil
	require.Equal(t, Unknown, w.runOne(t, hostCopies)[0].Verdict)
}
