package flight

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// traceVersion is the version of PyTorch's trace whose field names the dump uses.
const traceVersion = "2.10"

// A dump has the field names of PyTorch's flight recorder
// (torch._C._distributed_c10d._dump_nccl_trace_json). rank and size are additions of
// Chorus, because a process may have several ranks.
type dump struct {
	Version string                 `json:"version"`
	Library string                 `json:"comm_lib_version"`
	Config  map[string]groupConfig `json:"pg_config"`
	Status  map[string]groupStatus `json:"pg_status"`
	Chorus  source                 `json:"chorus"`
	Entries []dumpedEntry          `json:"entries"`
}

type groupConfig struct {
	Name  string `json:"name"`
	Desc  string `json:"desc"`
	Ranks string `json:"ranks"`
	Rank  int    `json:"rank"`
	Size  int    `json:"size"`
}

type groupStatus struct {
	Enqueued  string `json:"last_enqueued_collective"`
	Started   string `json:"last_started_collective"`
	Completed string `json:"last_completed_collective"`
}

type dumpedEntry struct {
	Record        uint64    `json:"record_id"`
	Group         int64     `json:"pg_id"`
	GroupName     [2]string `json:"process_group"`
	Rank          int       `json:"rank"`
	Collective    uint64    `json:"collective_seq_id"`
	Transfer      uint64    `json:"p2p_seq_id"`
	Op            uint64    `json:"op_id"`
	Name          string    `json:"profiling_name"`
	Created       int64     `json:"time_created_ns"`
	InputSizes    [][]int   `json:"input_sizes"`
	InputDTypes   []string  `json:"input_dtypes"`
	OutputSizes   [][]int   `json:"output_sizes"`
	OutputDTypes  []string  `json:"output_dtypes"`
	State         string    `json:"state"`
	Queued        bool      `json:"queued,omitempty"` // its stream has not reached it
	Batch         uint64    `json:"batch_id"`         // record of the first operation of its batch
	End           string    `json:"end,omitempty"`    // how it ended if it is not known to have completed
	SeenStarted   *int64    `json:"time_discovered_started_ns"`
	SeenCompleted *int64    `json:"time_discovered_completed_ns"`
	Retired       bool      `json:"retired"`
	TimeoutMillis int64     `json:"timeout_ms"`
	Transfers     bool      `json:"is_p2p"`
	Captured      bool      `json:"captured"`
	Uneven        bool      `json:"uneven,omitempty"` // the sizes may differ between ranks
	Reduction     string    `json:"reduction,omitempty"`
	Root          *int      `json:"root,omitempty"`
	Frames        []Frame   `json:"frames"`
}

// torchTypes are PyTorch's names of the types in traces.
var torchTypes = [...]string{
	memory.Bool: "Bool", memory.Int8: "Char", memory.Uint8: "Byte", memory.Int16: "Short", memory.Uint16: "UInt16",
	memory.Int32: "Int", memory.Uint32: "UInt32", memory.Int64: "Long", memory.Uint64: "UInt64",
	memory.Float16: "Half", memory.BFloat16: "BFloat16", memory.Float32: "Float", memory.Float64: "Double",
	memory.Float8E4M3: "Float8_e4m3fn", memory.Float8E5M2: "Float8_e5m2",
}

// Dump writes recorders as JSON with the field names of PyTorch's flight recorder.
func Dump(w io.Writer, recorders []*Recorder) error { return DumpShort(w, recorders, math.MaxInt) }

// DumpShort is Dump with at most n operations of each recorder. See shorten.
func DumpShort(w io.Writer, recorders []*Recorder, n int) error {
	if w == nil {
		return errors.New("nccl: dump trace: nothing to write to given")
	}
	d := dump{Version: traceVersion, Chorus: newSource(), Config: map[string]groupConfig{}, Status: map[string]groupStatus{}, Entries: []dumpedEntry{}}
	for _, r := range recorders {
		d.add(r, n)
	}
	if err := json.NewEncoder(w).Encode(&d); err != nil {
		return fmt.Errorf("nccl: dump trace: %w", err)
	}
	return nil
}

func (d *dump) add(r *Recorder, most int) {
	id := strconv.FormatInt(r.Number, 10)
	d.Library = r.Library
	d.Config[id] = groupConfig{Name: r.Group, Desc: r.Name, Ranks: r.ranksText(), Rank: r.Rank, Size: r.Size}
	issued, completed := r.Final()
	started := r.started()
	number := func(e Entry) string {
		if e.ID == 0 {
			return "-1"
		}
		return strconv.FormatUint(e.Collective, 10)
	}
	d.Status[id] = groupStatus{Enqueued: number(issued), Started: number(started), Completed: number(completed)}
	trace := r.Trace()
	list := shorten(trace, most)
	d.Chorus.add(r, len(list) < len(trace))
	for _, o := range list {
		d.Entries = append(d.Entries, r.dumped(o))
	}
}

// shorten returns at most n operations: the last ones. If the first one that is not known to have completed
// is earlier, half of them begin at the operation before that one, because the ranks may wait in it.
func shorten(list []Operation, n int) []Operation {
	if len(list) <= n {
		return list
	}
	pending := slices.IndexFunc(list, func(o Operation) bool {
		return o.State != Completed.String() && o.State != Unknown.String() && !o.Captured
	})
	from := max(pending-1, 0)
	if half := n / 2; pending >= 0 && from < len(list)-n {
		return slices.Concat(list[from:from+half], list[len(list)-(n-half):])
	}
	return list[len(list)-n:]
}

// ranksText returns the world ranks of the communicator in PyTorch's form, or the ranks in the
// communicator if the world ranks are not known.
func (r *Recorder) ranksText() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	ranks := make([]string, r.Size)
	for i := range ranks {
		if ranks[i] = strconv.Itoa(i); i < len(r.world) {
			ranks[i] = strconv.Itoa(r.world[i])
		}
	}
	return "[" + strings.Join(ranks, ", ") + "]"
}

func (r *Recorder) dumped(o Operation) dumpedEntry {
	sizes, types := func(n int) [][]int { return [][]int{{n}} }, []string{torchTypes[o.DType]}
	e := dumpedEntry{
		Record: o.Record, Group: r.Number, GroupName: [2]string{r.Group, r.Name}, Rank: r.Rank,
		Collective: o.Collective, Transfer: o.Transfer, Op: o.Record, Name: "nccl:" + Kinds[o.kind].Torch,
		Created: o.Created.UnixNano(), InputSizes: sizes(o.In), InputDTypes: types, OutputSizes: sizes(o.Out), OutputDTypes: types,
		State: o.state.torch(), Queued: o.Queued, Batch: o.batch, Retired: o.state == Completed, TimeoutMillis: o.Timeout.Milliseconds(),
		Transfers: Kinds[o.kind].Peer, Captured: o.Captured, Uneven: o.kind >= AllGatherV, Reduction: o.Reduction, Frames: o.Frames,
	}
	switch o.kind {
	case Send:
		e.Name += fmt.Sprintf(" %d->%d", r.Rank, o.Root)
	case Recv:
		e.Name += fmt.Sprintf(" %d<-%d", r.Rank, o.Root)
	}
	if o.Root >= 0 {
		e.Root = &o.Root
	}
	if !o.Started.IsZero() {
		at := o.Started.UnixNano()
		e.SeenStarted = &at
		if o.state != Completed {
			e.State = "started"
		}
	}
	if o.state == Completed {
		at := o.Completed.UnixNano()
		e.SeenCompleted = &at
	}
	if o.state > Completed {
		e.End = o.state.String()
	}
	if e.Frames == nil {
		e.Frames = []Frame{}
	}
	return e
}
