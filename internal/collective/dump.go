package collective

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/timeline"
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
	Uneven        bool      `json:"uneven,omitempty"`  // the sizes may differ between ranks
	Kind          string    `json:"kind,omitempty"`    // of an operation for which PyTorch has no name
	Format        string    `json:"format,omitempty"`  // of its 8-bit numbers
	Options       string    `json:"options,omitempty"` // what else must be the same on all ranks
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
		Transfers: Kinds[o.kind].Peer, Captured: o.Captured, Uneven: Kinds[o.kind].Uneven, Reduction: o.Reduction, Options: o.Options, Frames: o.Frames,
	}
	if Kinds[o.kind].NotTorch {
		e.Kind = o.kind.Label()
	}
	if o.Format != 0 {
		e.Format = torchTypes[o.Format]
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

// A source says where a dump comes from. It is a separate object, which PyTorch's
// tools ignore.
//
// The state of an entry is what the host has observed: "scheduled", "started" or "completed". The recorder
// does not record two events for each operation, so an operation that is "scheduled" may have started.
// With "queued" it has not: its stream had not reached it when the host observed the stream. Entries with the same
// batch were issued together. An operation whose record is above Accepted is in a call of NCCL that
// has not returned.
type source struct {
	Format int           `json:"format"` // 1
	Host   string        `json:"host"`
	PID    int           `json:"pid"`
	Clock  clockPair     `json:"clock"` // when the dump was written
	Origin clockPair     `json:"clock_origin"`
	Groups []sourceGroup `json:"groups"`
}

// A clockPair is one moment by two clocks. Times of entries are Origin's wall clock plus the
// elapsed time of the monotonic clock, which all processes of a host share.
type clockPair struct {
	Wall      int64 `json:"wall_ns"`
	Monotonic int64 `json:"monotonic_ns"`
}

// A sourceGroup describes the rank of a recorder.
type sourceGroup struct {
	Group      int64  `json:"pg_id"`
	Rank       int    `json:"rank"`
	WorldRank  *int   `json:"world_rank"`  // null if not known
	WorldRanks []int  `json:"world_ranks"` // by rank; null if not known
	WorldSize  int    `json:"world_size"`  // 0 if not known
	Device     string `json:"device"`
	UUID       string `json:"uuid"`
	Capacity   int    `json:"capacity"`              // operations that the ring holds; 0 if the trace is off
	Issued     uint64 `json:"issued"`                // record of the last operation
	Accepted   uint64 `json:"accepted"`              // record of the last operation that NCCL has accepted
	End        string `json:"end,omitempty"`         // how it ended on this rank, as noticed first
	EndFollows bool   `json:"end_follows,omitempty"` // the cause may be another rank
	Shortened  bool   `json:"shortened,omitempty"`   // the dump does not have all operations of the ring
	Launched   uint64 `json:"launched,omitempty"`    // collectives that launches of graphs have enqueued
	Launches   bool   `json:"launches,omitempty"`    // launches or one-sided operations, which no entry has, are not known to have ended
}

func newSource() source {
	host, _ := os.Hostname() // "" if it is not known
	now := clockPair{Wall: time.Now().UnixNano(), Monotonic: nanotime()}
	return source{
		Format: 1, Host: host, PID: os.Getpid(), Clock: now,
		Origin: clockPair{Wall: origin.UnixNano(), Monotonic: originNanos}, Groups: []sourceGroup{},
	}
}

func (s *source) add(r *Recorder, shortened bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := sourceGroup{
		Group: r.Number, Rank: r.Rank, WorldRanks: slices.Clone(r.world), WorldSize: r.worldSize, Device: r.Device, UUID: r.UUID,
		Capacity: len(r.ring), Issued: r.last, Accepted: r.enqueued, Shortened: shortened, End: r.end, EndFollows: r.endFollows,
		Launched: r.LaunchedCollectives(), Launches: r.launchesLeft || r.launchesPending(),
	}
	if r.hidden {
		g.Capacity = 0
	}
	if r.Rank < len(r.world) {
		g.WorldRank = &g.WorldRanks[r.Rank]
	}
	s.Groups = append(s.Groups, g)
}

// Reasons of failures of collectives.
const (
	ReasonTimeout  = "timeout"
	ReasonPeerLost = "peer_lost"
	ReasonMismatch = "mismatch" // ranks of this process issued different operations
	ReasonAsync    = "async"    // the operation failed after it was enqueued
	ReasonRefused  = "refused"  // the library did not accept it
)

// account counts the failures and the durations of the process's collectives for the status.
var account struct {
	mu        sync.Mutex
	errors    map[[2]string]uint64 // by group and reason
	durations map[[2]string]*status.Durations
}

var registerAccount = sync.OnceFunc(func() { status.Add("the account of collectives", describeAccount) })

// mostGroups limits the names of groups in metrics; further groups count as "other".
const mostGroups = 32

// CountError counts a failure of a collective.
func (r *Recorder) CountError(reason string) {
	registerAccount()
	group := r.Name
	if group == "" {
		group = "world"
	}
	account.mu.Lock()
	defer account.mu.Unlock()
	if account.errors == nil {
		account.errors = map[[2]string]uint64{}
	}
	if _, known := account.errors[[2]string{group, reason}]; !known && len(account.errors) >= mostGroups {
		group = "other"
	}
	account.errors[[2]string{group, reason}]++
}

// countDuration counts the time of a collective of a timeline. The time of a single
// operation of a batch is not known.
func countDuration(x *timeline.Record) {
	if len(x.Ops) != 1 {
		return
	}
	key := [2]string{plainName(x.Ops[0].Name), SizeNames[sizeClass(x.Bytes)]}
	account.mu.Lock()
	defer account.mu.Unlock()
	if account.durations == nil {
		account.durations = map[[2]string]*status.Durations{}
	}
	d := account.durations[key]
	if d == nil {
		d = &status.Durations{Op: key[0], Size: key[1]}
		account.durations[key] = d
	}
	d.Add(float64(x.End-x.Begin) / 1e9)
}

// plainName returns the name of a kind for metrics, such as all_reduce.
func plainName(name string) string {
	for k := range NumKinds {
		if k.String() == name {
			return k.Label()
		}
	}
	return name
}

func describeAccount(p *status.Process) {
	account.mu.Lock()
	defer account.mu.Unlock()
	for k, n := range account.errors {
		p.Errors = append(p.Errors, status.Errors{Group: k[0], Reason: k[1], Count: n})
	}
	for _, d := range account.durations {
		p.Durations = append(p.Durations, *d)
	}
}

// A Suspicion is a range of operations. One of these operations may hang.
type Suspicion struct {
	First, Last Entry
	Lost        bool          // an earlier operation, which the ring has overwritten, may hang too
	Marked      bool          // a mark proves that one of the operations, or other work between them, has not completed
	Begun       int64         // when the latest was issued, by the recorder's clock
	Timeout     time.Duration // 0 means none
}

// Suspects returns the operations that may hang, if any: from the first one that is not
// known to have completed up to the first mark ahead.
func (r *Recorder) Suspects(ahead []Mark) (x Suspicion, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.oldest()
	if e == nil {
		return x, false
	}
	x = Suspicion{First: *e, Last: *e, Begun: e.Begun}
	for id := r.resolved + 1; id < e.ID && !x.Lost; id++ {
		x.Lost = r.find(id) == nil
	}
	last := r.running
	for _, k := range ahead {
		if k.Next > 0 && k.Next <= e.ID && k.Stream == e.stream {
			x.Marked = true // the stream has not reached the first one
			continue
		}
		if k.Record > r.resolved && (r.ordered() || k.Stream == e.stream) {
			last, x.Marked = k.Record, true
			x.Begun = min(x.Begun, k.At) // in case the ring has overwritten the operations before the mark
			break
		}
	}
	for id := e.ID; id <= last; id++ {
		if l := r.find(id); l != nil && l.runs() && l.state == Scheduled && (r.ordered() || l.stream == e.stream) {
			if x.Last = *l; x.Marked {
				x.Begun = l.Begun
			}
		}
	}
	return x, true
}

// Narrow ends the range at the first collective that another rank of the process has not
// issued, if that collective cannot complete here without that rank.
func (x *Suspicion) Narrow(r *Recorder, others []*Recorder) {
	if next, found := r.awaited(x.First, others); found && next.ID >= x.First.ID && next.ID < x.Last.ID && r.waitsFor(next, others) {
		x.Last, x.Begun = next, next.Begun
	}
}

// waitsFor reports whether a collective cannot complete on this rank before the ranks that
// have not issued it do so.
func (r *Recorder) waitsFor(e Entry, others []*Recorder) bool {
	switch {
	case e.Kind.OfExperts():
		return true
	case e.N == 0 || e.Kind == AllGatherV || e.Kind == ReduceScatterV || e.Kind == AllToAllV:
		return false // a rank may have an empty part and not wait
	case !Kinds[e.Kind].Rooted:
		return true
	}
	if Kinds[e.Kind].DstRoot { // the other ranks only send
		return r.Rank == e.Root
	}
	for _, m := range others {
		if issued, _ := m.Issued(); m.Rank == e.Root {
			return issued < e.Collective
		}
	}
	return false
}

// awaited returns the first collective from e on that another rank has not issued.
func (r *Recorder) awaited(e Entry, others []*Recorder) (next Entry, found bool) {
	fewest := uint64(math.MaxUint64)
	for _, m := range others {
		issued, _ := m.Issued()
		fewest = min(fewest, issued)
	}
	if fewest == math.MaxUint64 {
		return Entry{}, false
	}
	return r.Collective(max(fewest+1, e.Collective))
}
