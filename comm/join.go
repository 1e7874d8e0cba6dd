package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// A Rendezvous is how the processes of a group find each other; cluster.Session
// is one. Its methods may be called by any goroutine at any time. It is the key of a map,
// and so of a comparable type, such as a pointer.
type Rendezvous interface {
	Rank() int
	Size() int
	// Context ends, with the cause, when a rank is lost.
	Context() context.Context
	// Set publishes a value to all ranks; Get waits for it.
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
}

// Join makes a group with one rank in each process of r, here on dev. It
// returns when all ranks have called it, with the cause when ctx ends before,
// and with an error on every rank when two of them are on one GPU, or when it fails or its
// ctx ends on one of them, which the others name. The group is broken as soon as r loses a
// rank, so that no collective waits for it.
//
// Processes may Join several times; they must do so in the same order.
func Join(ctx context.Context, r Rendezvous, dev *device.Device) (*Group, error) {
	return JoinWith(ctx, r, dev, nil)
}

// JoinWith is Join with options.
func JoinWith(ctx context.Context, r Rendezvous, dev *device.Device, cfg *Config) (*Group, error) {
	if r == nil || dev == nil {
		return nil, errors.New("comm: join: no rendezvous or no device given")
	}
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
	j := &joining{r: r, dev: dev, cfg: cfg, strategy: s, prefix: fmt.Sprintf("comm/%d/", nextGroup(r))}
	if err := alarmed(ctx, r, j.prefix, j.run); err != nil {
		return nil, errors.Join(fmt.Errorf("comm: join as rank %d of %d on %s: %w", r.Rank(), r.Size(), dev, err), j.group.Close())
	}
	return j.group, nil
}

// A joining is one call of Join.
type joining struct {
	r        Rendezvous
	dev      *device.Device
	cfg      *Config
	strategy Strategy
	prefix   string // of its keys
	group    *Group // as far as it was made
}

func (j *joining) run(ctx context.Context) error {
	v, err := j.agree(ctx)
	if err != nil {
		return err
	}
	w := &words{r: j.r, prefix: j.prefix, hosts: v.Hosts}
	c, err := nccl.NewCommunicator(ctx, j.dev, v.ID, j.r.Rank(), j.r.Size(), j.cfg.nccl(w.hook()))
	if err != nil {
		return err
	}
	if j.group, err = newGroup([]*nccl.Communicator{c}, j.cfg); err != nil {
		return err
	}
	exchange := exchangeBy(j.r, j.prefix+"ways/")
	if err := j.group.openWays(ctx, j.strategy, func(int) fabric.Exchange { return exchange }); err != nil {
		return err
	}
	j.group.watch(w)
	if err := j.group.tuned(ctx); err != nil {
		return err
	}
	return fabric.Confer(ctx, exchange, j.r.Size(), nil) // nobody has a group before all have
}

// card is what each rank tells rank 0 about itself.
type card struct {
	Host     string // its name
	Machine  string // which host it is
	PID      int
	Device   string
	UUID     string
	Backend  string
	Strategy string
	NCCL     string // its version
}

// verdict is what rank 0 answers to all.
type verdict struct {
	ID      nccl.UniqueID
	Hosts   []int  // of each rank, numbered by their first ranks
	Refused string // why there is no group, or ""
}

// agree checks that the ranks fit together and gives all of them one id: a card
// from each rank to rank 0, and one verdict back. NCCL itself would hang, or
// fail without saying which ranks do not fit.
func (j *joining) agree(ctx context.Context) (v verdict, err error) {
	mine, err := cardOf(j.dev, j.strategy)
	if err != nil {
		return v, err
	}
	if me := j.r.Rank(); me != 0 {
		if err := put(ctx, j.r, fmt.Sprint(j.prefix, me), mine); err != nil {
			return v, err
		}
		if err := get(ctx, j.r, j.prefix+"verdict", &v); err != nil {
			return v, fmt.Errorf("wait for rank 0: %w", err)
		}
		return v, v.check(j.r.Size())
	}
	cards := make([]card, j.r.Size())
	cards[0] = mine
	for i := 1; i < len(cards); i++ {
		if err := get(ctx, j.r, fmt.Sprint(j.prefix, i), &cards[i]); err != nil {
			return v, fmt.Errorf("wait for rank %d: %w", i, err)
		}
	}
	v = verdict{Hosts: hostsOf(cards), Refused: misfit(cards)}
	if v.Refused == "" {
		// Made only now: NCCL's listener waits for exactly these ranks.
		if v.ID, err = nccl.NewUniqueID(j.dev); err != nil {
			return v, err
		}
	}
	if err := put(ctx, j.r, j.prefix+"verdict", v); err != nil {
		return v, err
	}
	return v, v.err()
}

func (v *verdict) err() error {
	if v.Refused != "" {
		return unfit(errors.New(v.Refused))
	}
	return nil
}

// check is err for what another process has written.
func (v *verdict) check(ranks int) error {
	if v.Refused == "" && len(v.Hosts) != ranks {
		return fmt.Errorf("rank 0 tells the hosts of %d ranks of %d: %w", len(v.Hosts), ranks, ErrMismatch)
	}
	return v.err()
}

func cardOf(dev *device.Device, s Strategy) (card, error) {
	uuid, err := dev.UUID()
	if err != nil {
		return card{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		return card{}, err
	}
	version, err := nccl.Version(dev)
	if err != nil {
		return card{}, err
	}
	return card{Host: host, Machine: fabric.Host(), PID: os.Getpid(), Device: dev.String(), UUID: uuid, Backend: dev.System().Backend(), Strategy: s.String(), NCCL: version}, nil
}

// hostsOf numbers the hosts.
func hostsOf(cards []card) []int {
	seen, hosts := map[string]int{}, make([]int, len(cards))
	for i, c := range cards {
		if _, known := seen[c.Machine]; !known {
			seen[c.Machine] = len(seen)
		}
		hosts[i] = seen[c.Machine]
	}
	return hosts
}

// misfit says why the ranks cannot make a group, or "".
func misfit(cards []card) string {
	first := map[string]int{}
	for i, c := range cards {
		if c.Backend != cards[0].Backend {
			return fmt.Sprintf("rank 0 uses %s devices and rank %d %s devices: set CHORUS_BACKEND alike for all", cards[0].Backend, i, c.Backend)
		}
		if c.Strategy != cards[0].Strategy {
			return fmt.Sprintf("the strategy of rank 0 is %s and that of rank %d is %s: set Config.Strategy or CHORUS_COMM_STRATEGY alike for all", cards[0].Strategy, i, c.Strategy)
		}
		if c.NCCL != cards[0].NCCL {
			return fmt.Sprintf("rank 0 has NCCL %s and rank %d NCCL %s: let all load the same", cards[0].NCCL, i, c.NCCL)
		}
		if j, taken := first[c.UUID]; taken {
			return fmt.Sprintf("ranks %d (pid %d) and %d (pid %d) are both on %s %s of host %s: a GPU holds one rank; open the device of the local rank",
				j, cards[j].PID, i, c.PID, c.Device, c.UUID, c.Host)
		}
		first[c.UUID] = i
	}
	return ""
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
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// joined counts the groups of each rendezvous, so that each Join has keys of
// its own. An entry goes with the rendezvous.
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
