package comm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/nccl"
)

// A Rendezvous connects the processes of a group; cluster.Session and cluster.World
// implement it. Its methods may be called by any goroutine at any time. Its type must be comparable, such as
// a pointer, because it is used as a map key.
type Rendezvous interface {
	Rank() int
	Size() int
	// Context ends with the cause when a rank is lost.
	Context() context.Context
	// Set publishes a value to all ranks; Get waits for it.
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
}

// Join returns a group with one rank in each process of r; the local rank uses dev. It
// returns when all ranks have called it, or when ctx ends. It returns an error on every
// rank if two ranks use the same GPU, or if Join fails or its ctx ends on one rank; the
// error then names that rank. The group is broken as soon as r loses a rank, or as the epoch of
// a World ends, so that no collective waits for it. Close the group of an epoch before the
// function of cluster.Run returns.
//
// Processes may call Join several times, in the same order in all processes.
func Join(ctx context.Context, r Rendezvous, dev *device.Device, cfg *Config) (*Group, error) {
	return JoinDevices(ctx, r, []*device.Device{dev}, cfg)
}

// JoinDevices is Join with a rank on each of devs, which are different GPUs of one System, as in
// ncclCommInitRank for each device within ncclGroupStart and ncclGroupEnd. The first process of r has the ranks from
// 0 on, its first device rank 0, and the next process those that follow. The processes may have different
// numbers of devices, but each needs at least one. If a process fails, the others get an error that names the
// rank of the process in r.
//
// Operations of the group take a slice for each local rank, as those of Local do. The strategy Tuned, and
// functions that say so, need the same number of ranks in all processes.
func JoinDevices(ctx context.Context, r Rendezvous, devs []*device.Device, cfg *Config) (*Group, error) {
	if r == nil {
		return nil, errors.New("comm: join: no rendezvous given")
	}
	return join(ctx, r, func() ([]*device.Device, error) { return devs, nil }, cfg)
}

// join is JoinDevices with a function that opens the devices. If it fails, the other processes get an
// error too.
func join(ctx context.Context, r Rendezvous, open func() ([]*device.Device, error), cfg *Config) (*Group, error) {
	if err := cfg.check("join"); err != nil {
		return nil, err
	}
	s, err := cfg.strategy()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.Context(), func() { cancel(context.Cause(r.Context())) })()
	j := &joining{r: r, open: open, cfg: cfg, strategy: s, prefix: fmt.Sprintf("comm/%d/", nextGroup(r))}
	if err := withAlarm(ctx, r, j.prefix, j.run); err != nil {
		return nil, errors.Join(fmt.Errorf("comm: join as %s %d of %d%s: %w", j.what(), r.Rank(), r.Size(), on(j.devs), err), j.group.Close())
	}
	return j.group, nil
}

// what says what a number of the Rendezvous is: the rank, or the process if it has several.
func (j *joining) what() string {
	if len(j.devs) > 1 {
		return "process"
	}
	return "rank"
}

// on names the devices of an error.
func on(devs []*device.Device) string {
	text := ""
	for i, d := range devs {
		if text += ", "; i == 0 {
			text = " on "
		}
		text += d.String()
	}
	return text
}

// A joining is one call of Join.
type joining struct {
	r        Rendezvous
	open     func() ([]*device.Device, error)
	devs     []*device.Device // nil until open has returned them
	cfg      *Config
	strategy route.Strategy
	prefix   string // of its keys in the Rendezvous
	group    *Group // the group so far
}

func (j *joining) run(ctx context.Context) (err error) {
	devs, err := j.open()
	if err != nil {
		return err
	}
	if err := distinct("join", devs); err != nil {
		return &localError{err}
	}
	j.devs = devs
	if err := encrypt(j.r, devs[0]); err != nil {
		return err
	}
	v, err := j.agree(ctx)
	if err != nil {
		return err
	}
	w := &reporter{r: j.r, prefix: j.prefix, hosts: v.Hosts, process: v.processes()}
	comms, err := j.communicators(ctx, &v, w)
	if err != nil {
		return err
	}
	if j.group, err = newGroup(comms, j.cfg); err != nil {
		return err
	}
	exchange := func(rank int) collective.Exchange { return exchangeBy(j.r, j.prefix+"routers/", rank, len(v.Hosts)) }
	if err := j.group.openRouters(ctx, j.strategy, v.Hosts, exchange); err != nil {
		return err
	}
	j.group.watch(w)
	if err := j.group.setInitialTuning(ctx); err != nil {
		return err
	}
	// No process returns a group before all processes have one.
	_, err = collective.Agree(ctx, exchangeBy(j.r, j.prefix+"ready/", j.r.Rank(), j.r.Size()), j.r.Size(), true, nil)
	return err
}

// communicators initializes the communicators of the local ranks together.
func (j *joining) communicators(ctx context.Context, v *admission, w *reporter) ([]*nccl.Communicator, error) {
	first, cfg := slices.Index(w.process, j.r.Rank()), j.cfg.nccl(w.onFailure())
	comms := make([]*nccl.Communicator, len(j.devs))
	eg, all := errgroup.WithContext(ctx)
	for i, dev := range j.devs {
		eg.Go(func() (err error) {
			comms[i], err = nccl.NewCommunicator(all, dev, v.ID, first+i, len(v.Hosts), cfg)
			return err
		})
	}
	err := eg.Wait()
	if err != nil {
		_ = concurrently(comms, (*nccl.Communicator).Close) // the earlier error is returned
	}
	return comms, err
}

// A rankInfo describes a rank to the first process.
type rankInfo struct {
	Host     string // its name in the job, or the system's
	Machine  string // identifies the host
	PID      int
	Device   string
	UUID     string
	Backend  string
	Strategy string
	Order    string // of deterministic reductions
	NCCL     string // version
	Shares   bool   // it may share its GPU
	Encrypts bool   // NCCL encrypts its connections
}

// An admission is the answer of the first process to all processes.
type admission struct {
	ID      nccl.UniqueID
	Counts  []int  // the number of ranks of each process
	Hosts   []int  // the host of each rank, numbered by its first rank
	Refused string // why the group cannot be made, or ""
}

// agree checks that the ranks are compatible and distributes one NCCL id: each process sends
// its ranks' rankInfos to the first one, which answers all with one admission. NCCL itself would hang, or
// fail without saying which ranks are incompatible.
func (j *joining) agree(ctx context.Context) (v admission, err error) {
	mine := make([]rankInfo, len(j.devs))
	for i, dev := range j.devs {
		if mine[i], err = rankInfoOf(dev, j.strategy, j.cfg); err != nil {
			return v, err
		}
		if named, ok := j.r.(interface{ Host() string }); ok { // such as a cluster.Session
			mine[i].Host = named.Host()
		}
	}
	if me := j.r.Rank(); me != 0 {
		if err := put(ctx, j.r, fmt.Sprint(j.prefix, me), mine); err != nil {
			return v, err
		}
		if err := get(ctx, j.r, j.prefix+"admission", &v); err != nil {
			return v, fmt.Errorf("wait for rank 0: %w", err)
		}
		return v, v.check(me, j.r.Size(), len(j.devs))
	}
	all, err := gather(ctx, j.r, j.prefix, j.r.Size())
	if err != nil {
		return v, err
	}
	infos, counts := mine, []int{len(mine)}
	for i := 1; i < len(all); i++ {
		var theirs []rankInfo
		if err := decode(fmt.Sprint(j.prefix, i), all[i], &theirs); err != nil {
			return v, fmt.Errorf("wait for rank %d: %w", i, err)
		}
		if len(theirs) == 0 {
			return v, fmt.Errorf("wait for rank %d: it has no devices: %w", i, ErrMismatch)
		}
		infos, counts = append(infos, theirs...), append(counts, len(theirs))
	}
	v = admission{Counts: counts, Hosts: hostsOf(infos), Refused: incompatibility(infos)}
	if shared := sharedGPU(infos, func(rankInfo) int { return 0 }); shared != nil && v.Refused == "" {
		slog.Warn("comm: " + shared.String() + " share a GPU: the results are right, but timings mean nothing")
	}
	if v.Refused == "" {
		// Only now: NCCL's listener waits for exactly these ranks.
		if v.ID, err = nccl.NewUniqueID(j.devs[0]); err != nil {
			return v, err
		}
	}
	if err := put(ctx, j.r, j.prefix+"admission", v); err != nil {
		return v, err
	}
	return v, v.err()
}

func (v *admission) err() error {
	if v.Refused != "" {
		return asBadArgument(errors.New(v.Refused))
	}
	return nil
}

// check returns the error of an admission that another process has written: here, process me of size has so many
// devices.
func (v *admission) check(me, size, devices int) error {
	if v.Refused != "" {
		return v.err()
	}
	ranks := 0
	for _, n := range v.Counts {
		if n < 1 || n > len(v.Hosts) {
			return fmt.Errorf("rank 0 says that a process has %d of %d ranks: %w", n, len(v.Hosts), ErrMismatch)
		}
		ranks += n
	}
	if len(v.Counts) != size || ranks != len(v.Hosts) || v.Counts[me] != devices {
		return fmt.Errorf("rank 0 says that the processes have %v ranks, and the hosts of %d: want %d processes, and %d ranks of process %d: %w",
			v.Counts, len(v.Hosts), size, devices, me, ErrMismatch)
	}
	return nil
}

// processes returns the process of each rank.
func (v *admission) processes() (list []int) {
	for process, n := range v.Counts {
		list = append(list, slices.Repeat([]int{process}, n)...)
	}
	return list
}

func rankInfoOf(dev *device.Device, s route.Strategy, cfg *Config) (rankInfo, error) {
	uuid, err := gpu.DeviceOf(dev).UUID()
	if err != nil {
		return rankInfo{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		return rankInfo{}, err
	}
	version, err := nccl.Version(dev)
	if err != nil {
		return rankInfo{}, err
	}
	return rankInfo{Host: host, Machine: fabric.Host(), PID: os.Getpid(), Device: dev.String(), UUID: uuid, Backend: dev.System().Backend(), Strategy: s.String(), Order: cfg.orderName(), NCCL: version, Shares: ncclapi.SharesGPUs(), Encrypts: encrypts()}, nil
}

// hostsOf numbers the hosts by their first ranks.
func hostsOf(infos []rankInfo) []int {
	seen, hosts := map[string]int{}, make([]int, len(infos))
	for i, c := range infos {
		if _, known := seen[c.Machine]; !known {
			seen[c.Machine] = len(seen)
		}
		hosts[i] = seen[c.Machine]
	}
	return hosts
}

// incompatibility says why the ranks are incompatible, or returns "".
func incompatibility(infos []rankInfo) string {
	for i, c := range infos {
		if c.Shares != infos[0].Shares {
			return fmt.Sprintf("ranks 0 and %d differ in %s: set it alike for all", i, env.ShareGPUs.Name)
		}
		if c.Encrypts != infos[0].Encrypts {
			return fmt.Sprintf("ranks 0 and %d differ in %s: set it alike for all", i, env.NCCLEncrypt.Name)
		}
		if c.Backend != infos[0].Backend {
			return fmt.Sprintf("rank 0 uses %s devices and rank %d %s devices: set CHORUS_BACKEND alike for all", infos[0].Backend, i, c.Backend)
		}
		if c.Strategy != infos[0].Strategy {
			return fmt.Sprintf("the strategy of rank 0 is %s and that of rank %d is %s: set Config.Strategy or CHORUS_COMM_STRATEGY alike for all", infos[0].Strategy, i, c.Strategy)
		}
		if c.Order != infos[0].Order {
			return fmt.Sprintf("the order of deterministic reductions is %s on rank 0 and %s on rank %d: set Config.Deterministic alike for all", infos[0].Order, c.Order, i)
		}
		if c.NCCL != infos[0].NCCL {
			return fmt.Sprintf("rank 0 has NCCL %s and rank %d NCCL %s: let all load the same", infos[0].NCCL, i, c.NCCL)
		}
	}
	p := sharedGPU(infos, func(rankInfo) int { return 0 })
	switch {
	case p == nil:
		return ""
	case !p.a.Shares:
		return fmt.Sprintf("%s are both on %s %s of host %s: a GPU holds one rank; open the device of the local rank, or set %s=yes for tests",
			p, p.b.Device, p.b.UUID, p.b.Host, env.ShareGPUs.Name)
	}
	if p := sharedGPU(infos, func(c rankInfo) int { return c.PID }); p != nil {
		return fmt.Sprintf("%s are on %s %s of host %s in one process: NCCL refuses several communicators of a process on one GPU; start a process for each rank",
			p, p.b.Device, p.b.UUID, p.b.Host)
	}
	return ""
}

// A pair is two ranks on one GPU.
type pair struct {
	first, second int
	a, b          rankInfo
}

func (p *pair) String() string {
	return fmt.Sprintf("ranks %d (pid %d) and %d (pid %d)", p.first, p.a.PID, p.second, p.b.PID)
}

// sharedGPU returns the first pair of ranks on one GPU for which part is equal, or nil.
func sharedGPU(infos []rankInfo, part func(rankInfo) int) *pair {
	type place struct {
		gpu  string
		part int
	}
	first := map[place]int{}
	for i, c := range infos {
		at := place{c.UUID, part(c)}
		if j, taken := first[at]; taken {
			return &pair{j, i, infos[j], c}
		}
		first[at] = i
	}
	return nil
}

func put(ctx context.Context, r Rendezvous, key string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return r.Set(ctx, key, b)
}

func get(ctx context.Context, r Rendezvous, key string, v any) error {
	b, err := r.Get(ctx, key)
	if err != nil {
		return err
	}
	return decode(key, b, v)
}

func decode(key string, b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	safe.Record(v)
	return nil
}

// joined counts the groups of each Rendezvous, so that each Join uses different keys. An
// entry is deleted when the context of its Rendezvous ends.
var joined struct {
	mu sync.Mutex
	n  map[Rendezvous]int
}

func nextGroup(r Rendezvous) int {
	joined.mu.Lock()
	defer joined.mu.Unlock()
	if joined.n == nil {
		joined.n = map[Rendezvous]int{}
	}
	if _, known := joined.n[r]; !known {
		context.AfterFunc(r.Context(), func() {
			joined.mu.Lock()
			defer joined.mu.Unlock()
			delete(joined.n, r)
		})
	}
	joined.n[r]++
	return joined.n[r]
}

// The processes of a group leave it together. The first rank of each process writes how it leaves: it shuts the
// group down after its operations have completed, or it closes the group or has failed. Rank 0 reads the
// others' texts and writes one answer, so that the number of reads grows with the number of processes and not with its
// square.

// shutDown is how a rank leaves whose operations have completed.
const shutDown = "shut down"

func (w *reporter) leaveKey(rank int) string { return fmt.Sprint(w.prefix, "leave/", rank) }

func (w *reporter) readKey(rank int) string { return fmt.Sprint(w.prefix, "leave/read/", rank) }

func (w *reporter) answerKey() string { return w.prefix + "leave/answer" }

// leave writes how a rank leaves, at its first call only.
func (w *reporter) leave(ctx context.Context, rank int, how string) (err error) {
	w.leaving.Do(func() {
		if rank == 0 && how != shutDown {
			err = w.r.Set(ctx, w.answerKey(), []byte("rank 0 "+how))
			return
		}
		err = w.r.Set(ctx, w.leaveKey(rank), []byte(how))
	})
	return err
}

// awaitOthers waits until all processes have shut the group down; rank is the first rank here. It returns an error if a
// process leaves in another way, even if its own Shutdown had begun before, or if the Rendezvous loses a rank.
func (w *reporter) awaitOthers(ctx context.Context, rank int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lost := w.r.Context()
	defer context.AfterFunc(lost, func() { cancel(context.Cause(lost)) })()
	go func() {
		ended, _ := w.await(ctx, w.endedKey())
		if rank, how, ok := strings.Cut(string(ended), " "); ok && how != shutGroup {
			w.ended.Store(true)
			cancel(errLeft("rank " + rank + " " + how))
		}
	}()
	if err := w.leave(ctx, rank, shutDown); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	if rank > 0 {
		answer, ok := w.await(ctx, w.answerKey())
		if !ok {
			return context.Cause(ctx)
		}
		_ = w.r.Set(ctx, w.readKey(rank), []byte("read")) // rank 0 waits for it only as long as there is a store
		return errLeft(string(answer))
	}
	answer, others := shutDown, w.firstRanks()[1:]
	for _, peer := range others {
		how, ok := w.await(ctx, w.leaveKey(peer))
		if !ok {
			return context.Cause(ctx)
		}
		if string(how) != shutDown {
			answer = fmt.Sprintf("rank %d %s", peer, how)
			break
		}
	}
	if err := w.r.Set(ctx, w.answerKey(), []byte(answer)); err != nil {
		return cmp.Or(errLeft(answer), context.Cause(ctx), err) // a rank that leaves otherwise also ends ctx
	}
	for _, peer := range others { // the store may end with this process
		if answer != shutDown {
			break
		}
		if _, ok := w.await(ctx, w.readKey(peer)); !ok {
			if left, ok := errors.AsType[*leftError](context.Cause(ctx)); ok { // the peer has given up since
				return left
			}
			break
		}
	}
	return errLeft(answer)
}

// errLeft returns the error for an answer of rank 0.
func errLeft(answer string) error {
	if answer == shutDown {
		return nil
	}
	who, why, _ := strings.Cut(told(answer), ": ")
	text := who + " instead of shutting it down"
	if why != "" {
		text += ": " + why
	}
	return &leftError{text, strings.HasSuffix(who, " "+closedGroup)}
}

// A leftError reports that another process has ended the group otherwise than by Shutdown.
type leftError struct {
	text   string
	closed bool // it has closed the intact group
}

func (e *leftError) Error() string { return e.text }

func (e *leftError) Is(target error) bool {
	return target == ErrBroken || target == ErrLeft && e.closed
}
