package doctor

import (
	"io/fs"
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
