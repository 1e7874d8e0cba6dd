package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/internal/route"
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
	if r == nil || dev == nil {
		return nil, errors.New("comm: join: no rendezvous or no device given")
	}
	return join(ctx, r, func() (*device.Device, error) { return dev, nil }, cfg)
}

// join is Join with a function that opens the device. If it fails, the other ranks get an
// error too.
func join(ctx context.Context, r Rendezvous, open func() (*device.Device, error), cfg *Config) (*Group, error) {
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
		on := ""
		if j.dev != nil {
			on = " on " + j.dev.String()
		}
		return nil, errors.Join(fmt.Errorf("comm: join as rank %d of %d%s: %w", r.Rank(), r.Size(), on, err), j.group.Close())
	}
	return j.group, nil
}

// A joining is one call of Join.
type joining struct {
	r        Rendezvous
	open     func() (*device.Device, error)
	dev      *device.Device // nil until open has returned it
	cfg      *Config
	strategy route.Strategy
	prefix   string // of its keys in the Rendezvous
	group    *Group // the group so far
}

func (j *joining) run(ctx context.Context) (err error) {
	if j.dev, err = j.open(); err != nil {
		return err
	}
	if err := encrypt(j.r, j.dev); err != nil {
		return err
	}
	v, err := j.agree(ctx)
	if err != nil {
		return err
	}
	w := &reporter{r: j.r, prefix: j.prefix, hosts: v.Hosts}
	c, err := nccl.NewCommunicator(ctx, j.dev, v.ID, j.r.Rank(), j.r.Size(), j.cfg.nccl(w.onFailure()))
	if err != nil {
		return err
	}
	if j.group, err = newGroup([]*nccl.Communicator{c}, j.cfg); err != nil {
		return err
	}
	exchange := exchangeBy(j.r, j.prefix+"routers/")
	if err := j.group.openRouters(ctx, j.strategy, v.Hosts, func(int) fabric.Exchange { return exchange }); err != nil {
		return err
	}
	j.group.watch(w)
	if err := j.group.setInitialTuning(ctx); err != nil {
		return err
	}
	return fabric.Agree(ctx, exchange, j.r.Size(), nil) // no rank returns a group before all ranks have one
}

// A rankInfo describes a rank to rank 0.
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

// An admission is the answer of rank 0 to all ranks.
type admission struct {
	ID      nccl.UniqueID
	Hosts   []int  // the host of each rank, numbered by its first rank
	Refused string // why the group cannot be made, or ""
}

// agree checks that the ranks are compatible and distributes one NCCL id: each rank sends
// its rankInfo to rank 0, and rank 0 answers all with one admission. NCCL itself would hang, or
// fail without saying which ranks are incompatible.
func (j *joining) agree(ctx context.Context) (v admission, err error) {
	mine, err := rankInfoOf(j.dev, j.strategy, j.cfg)
	if err != nil {
		return v, err
	}
	if named, ok := j.r.(interface{ Host() string }); ok { // such as a cluster.Session
		mine.Host = named.Host()
	}
	if me := j.r.Rank(); me != 0 {
		if err := put(ctx, j.r, fmt.Sprint(j.prefix, me), mine); err != nil {
			return v, err
		}
		if err := get(ctx, j.r, j.prefix+"admission", &v); err != nil {
			return v, fmt.Errorf("wait for rank 0: %w", err)
		}
		return v, v.check(j.r.Size())
	}
	all, err := gather(ctx, j.r, j.prefix)
	if err != nil {
		return v, err
	}
	infos := make([]rankInfo, len(all))
	infos[0] = mine
	for i := 1; i < len(infos); i++ {
		if err := decode(fmt.Sprint(j.prefix, i), all[i], &infos[i]); err != nil {
			return v, fmt.Errorf("wait for rank %d: %w", i, err)
		}
	}
	v = admission{Hosts: hostsOf(infos), Refused: incompatibility(infos)}
	if shared := sharedGPU(infos, func(rankInfo) int { return 0 }); shared != nil && v.Refused == "" {
		slog.Warn("comm: " + shared.String() + " share a GPU: the results are right, but timings mean nothing")
	}
	if v.Refused == "" {
		// Only now: NCCL's listener waits for exactly these ranks.
		if v.ID, err = nccl.NewUniqueID(j.dev); err != nil {
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

// check returns the error of an admission that another process has written.
func (v *admission) check(ranks int) error {
	if v.Refused == "" && len(v.Hosts) != ranks {
		return fmt.Errorf("rank 0 tells the hosts of %d ranks of %d: %w", len(v.Hosts), ranks, ErrMismatch)
	}
	return v.err()
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
	plain.Record(v)
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

// The ranks of a group over processes leave it together. Each rank writes how it leaves: it shuts the
// group down after its operations have completed, or it closes the group or has failed. Rank 0 reads the
// other ranks' texts and writes one answer, so that the number of reads grows with the number of ranks and not with its
// square.

// shutDown is how a rank leaves whose operations have completed.
const shutDown = "shut down"

func (w *reporter) leaveKey(rank int) string { return fmt.Sprint(w.prefix, "leave/", rank) }

func (w *reporter) readKey(rank int) string { return fmt.Sprint(w.prefix, "leave/read/", rank) }

func (w *reporter) answerKey() string { return w.prefix + "leave/answer" }

// leave writes how a rank leaves. Only the first call has an effect.
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

// awaitOthers waits until all ranks have shut the group down. It returns an error if a rank leaves in another way, or if
// the Rendezvous loses a rank.
func (w *reporter) awaitOthers(ctx context.Context, rank, size int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lost := w.r.Context()
	defer context.AfterFunc(lost, func() { cancel(context.Cause(lost)) })()
	if err := w.leave(ctx, rank, shutDown); err != nil {
		return err
	}
	if rank > 0 {
		answer, ok := w.await(ctx, w.answerKey())
		if !ok {
			return context.Cause(ctx)
		}
		_ = w.r.Set(ctx, w.readKey(rank), []byte("read")) // rank 0 waits for it only as long as there is a store
		return errLeft(string(answer))
	}
	answer := shutDown
	for peer := 1; peer < size && answer == shutDown; peer++ {
		how, ok := w.await(ctx, w.leaveKey(peer))
		if !ok {
			return context.Cause(ctx)
		}
		if string(how) != shutDown {
			answer = fmt.Sprintf("rank %d %s", peer, how)
		}
	}
	if err := w.r.Set(ctx, w.answerKey(), []byte(answer)); err != nil {
		return err
	}
	for peer := 1; peer < size && answer == shutDown; peer++ { // the store may end with this process
		if _, ok := w.await(ctx, w.readKey(peer)); !ok {
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
	return errors.New(plain.Text(answer) + " instead of shutting it down")
}
