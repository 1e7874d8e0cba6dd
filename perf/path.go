package perf

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/nvml"
	"github.com/gochorus/chorus/internal/safe"
)

// A Path is what carried the data between two ranks, if that is proved by NCCL's log of its connections and by the
// counters of NVLink.
type Path string

// The paths. PeerAccess is a direct copy between two GPUs whose NVLink counters are not readable, so that it is not
// known whether NVLink or PCIe carried it.
const (
	NVLink       Path = "NVLink"
	PCIe         Path = "PCIe"
	PeerAccess   Path = "peer access"
	SharedMemory Path = "shared memory"
	InfiniBand   Path = "InfiniBand" // or RoCE: NCCL's transport NET/IB
	Sockets      Path = "sockets"
	Network      Path = "network plugin" // another transport of NCCL below NET
	UnknownPath  Path = "unknown"
)

// recording is the file of RecordPaths.
var recording struct {
	sync.Mutex
	file string
}

// RecordPaths lets NCCL log its connections to a file of this process in a
// folder, so that [Check] reports the paths that NCCL uses, which are otherwise
// unknown. Call it before the process uses NCCL, which reads its variables
// once: it sets NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE, and fails if
// one of them is set. The caller removes the folder. Only one group at a time
// may be created while Check runs, because the log has ranks but no names of
// groups.
func RecordPaths(folder string) error {
	for _, name := range []string{"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"} {
		if v, ok := os.LookupEnv(name); ok {
			return fmt.Errorf("perf: record paths: %s=%s is set: unset it, or read NCCL's log yourself", name, v)
		}
	}
	recording.Lock()
	defer recording.Unlock()
	recording.file = filepath.Join(folder, fmt.Sprintf("nccl-%d.log", os.Getpid()))
	return errors.Join(os.Setenv("NCCL_DEBUG", "INFO"), os.Setenv("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET,GRAPH"), os.Setenv("NCCL_DEBUG_FILE", recording.file))
}

// connection matches a line such as
// "n1:71:93 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[1] via P2P/CUMEM/read".
var connection = regexp.MustCompile(`NCCL INFO Channel \d+(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\](?: \[(?:send|receive)\])? via ([A-Za-z0-9]+)(?:/([A-Za-z]+))?`)

// transports returns NCCL's transports of the connections in a log, by their
// ranks, or "" for a connection with several.
func transports(log string) map[[2]int]string {
	all := map[[2]int]string{}
	lines := bufio.NewScanner(strings.NewReader(log))
	for lines.Scan() {
		m := connection.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		from, err := strconv.Atoi(m[1])
		to, err2 := strconv.Atoi(m[2])
		if err != nil || err2 != nil {
			continue
		}
		name := m[3]
		if name == "NET" {
			name += "/" + m[4]
		}
		key := [2]int{from, to}
		if was, ok := all[key]; ok && was != name {
			name = ""
		}
		all[key] = name
	}
	return all
}

// mostLog limits the log that is read. A connection has some lines of 100 bytes for each channel.
const mostLog = 64 << 20

// loggedTransports returns the transports of this process's connections, or nil if they are not recorded.
func loggedTransports() map[[2]int]string {
	recording.Lock()
	defer recording.Unlock()
	if recording.file == "" {
		return nil
	}
	text, err := safe.Read(recording.file, mostLog)
	if err != nil {
		return nil
	}
	return transports(string(text))
}

// pathOf returns the path of a pair, from what its ranks know, which must agree
// for both directions.
func pathOf(p *PairResult, byRank []*pairState) Path {
	var paths [2]Path
	for i, rank := range p.Ranks {
		paths[i] = UnknownPath
		if byRank[rank] == nil {
			continue
		}
		for _, x := range byRank[rank].Results {
			if x.Partner == p.Ranks[1-i] {
				paths[i] = pathBy(x.Transport, &x)
			}
		}
	}
	switch {
	case paths[0] == paths[1], paths[1] == UnknownPath:
		return paths[0]
	case paths[0] == UnknownPath:
		return paths[1]
	}
	return UnknownPath
}

// pathBy returns the path of a transport of NCCL. NVLink's counters tell NVLink and PCIe apart: they have grown by what
// was sent, or they have hardly grown.
func pathBy(transport string, x *pairShare) Path {
	switch transport {
	case "SHM":
		return SharedMemory
	case "NET/IB", "NET/IBext":
		return InfiniBand
	case "NET/Socket":
		return Sockets
	case "P2P":
		switch {
		case !x.Counted || x.Sent == 0:
			return PeerAccess
		case x.NVLink >= x.Sent/2:
			return NVLink
		case x.NVLink < x.Sent/10:
			return PCIe
		}
		return PeerAccess
	}
	if strings.HasPrefix(transport, "NET/") {
		return Network
	}
	return UnknownPath
}

// nvlinkSent returns the bytes that a GPU has sent over all its NVLinks.
func nvlinkSent(d *device.Device) (uint64, bool) {
	if d.System().Backend() != gpu.CUDA {
		return 0, false
	}
	p, err := d.Properties()
	if err != nil {
		return 0, false
	}
	api, err := nvml.Open()
	if err != nil {
		return 0, false
	}
	dev, err := api.Device(p.UUID)
	if err != nil {
		return 0, false
	}
	h, err := nvml.HealthOf(dev)
	if err != nil {
		return 0, false
	}
	n, err := h.NVLinkSent()
	return n, err == nil
}
