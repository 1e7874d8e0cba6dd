package comm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// TuneConfig are the options of Tune; nil means the defaults. They must be the same on
// all ranks.
type TuneConfig struct {
	MaxBytes int            // the largest size: of an all-reduce, or of one rank's part; default 1 GiB of an all-reduce or of all ranks' parts together, a 64th of the memory of small GPUs, 256 bytes on virtual devices
	Types    []memory.DType // element types of the reductions; default float32 and bfloat16
	Ops      []Op           // default Sum and Max
}

// plan returns the options for package route.
func (cfg *TuneConfig) plan() (c route.PlanConfig) {
	if cfg != nil {
		c.MaxBytes, c.Types = cfg.MaxBytes, cfg.Types
		for _, o := range cfg.Ops {
			c.Ops = append(c.Ops, flight.Reduction(o))
		}
	}
	return c
}

// plan returns the measurements that Tune will make: the possible strategies for each
// operation, without times.
func (g *Group) plan(c route.PlanConfig) ([]route.Choice, error) {
	const op = "tune"
	if err := g.check(op); err != nil {
		return nil, err
	}
	plan, err := g.routers.Plan(c)
	if err != nil {
		return nil, badArgument(op, "%w", err)
	}
	return plan, nil
}

// Tune measures which strategy is the fastest for each operation and size between the
// ranks of g. g must use the strategy Tuned. From now on g uses the result; other groups
// use it if it is their Config.Tuning. All ranks return the same Tuning. Tune takes
// seconds, over slow links minutes, and waits for all operations on the group's streams;
// the devices must run nothing else. If NCCL is the only possibility, the Tuning is empty.
// If an error occurs while ranks may wait for others, the group is broken. Collective.
func Tune(ctx context.Context, g *Group, cfg *TuneConfig) (*Tuning, error) {
	options := cfg.plan()
	plan, err := g.plan(options)
	if err != nil {
		return nil, err
	}
	if len(g.routers) > 0 && g.routers.Opened() != route.Tuned {
		return nil, badArgument("tune", "the group was made with the strategy %s: make it with %s", g.routers.Opened(), Tuned)
	}
	at, err := g.sameSite(ctx)
	if err != nil {
		return nil, err
	}
	// Ranks with different plans would wait for each other.
	digest := sha256.Sum256(fmt.Append(nil, plan))
	if err := g.checkSame(ctx, "tune", fmt.Sprintf("the options %+v (plan %x)", options, digest[:4]), sameArguments); err != nil {
		return nil, err
	}
	t := &route.Tuning{For: at, Choices: plan}
	if len(plan) == 0 {
		return tuningOf(t), nil
	}
	mine, err := g.routers.Measure(ctx, plan)
	if err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	all, err := GatherValues(ctx, g, Gob, mine...)
	if err != nil {
		return nil, err
	}
	if err := g.routers.Complete(ctx, t, all); err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	g.routers.UseTuning(t.Index())
	return tuningOf(t), nil
}

// Site returns the conditions under which a Tuning of the group is valid.
func (g *Group) Site() (Site, error) {
	at, err := g.site()
	return Site(at), err
}

func (g *Group) site() (route.Site, error) {
	if g == nil {
		return route.Site{}, g.check("site")
	}
	dev := g.members[0].comm.Device()
	name, err := dev.Name()
	if err != nil {
		return route.Site{}, err
	}
	version, err := nccl.Version(dev)
	if err != nil {
		return route.Site{}, err
	}
	return route.Site{GPU: name, Ranks: g.size, Hosts: g.hosts(), Locals: len(g.members), Backend: dev.System().Backend(),
		Driver: dev.System().Libraries()[0].Version, NCCL: version, Kernels: g.kernelsVersion()}, nil
}

// kernelsVersion returns the version of the Chorus kernels. Times of deterministic groups count
// for these only, because NCCL does not reduce there.
func (g *Group) kernelsVersion() string {
	if g.alwaysInOrder() {
		return fabric.Version() + ", deterministic"
	}
	return fabric.Version()
}

// hosts returns the number of hosts.
func (g *Group) hosts() int {
	if g.reporter == nil {
		return 1
	}
	seen := map[int]bool{}
	for rank := range g.size {
		if g.reporter.world != nil {
			rank = g.reporter.world[rank]
		}
		seen[g.reporter.hosts[rank]] = true
	}
	return len(seen)
}

// sameSite returns the site, or an error on all ranks if their sites differ.
func (g *Group) sameSite(ctx context.Context) (route.Site, error) {
	at, err := g.site()
	if err != nil {
		return at, err
	}
	return at, g.checkSame(ctx, "tune", fmt.Sprintf("the site %+v", at), "a tuning is for ranks that are alike")
}

// setInitialTuning gives all ranks of a Tuned group the Tuning of rank 0: its Config.Tuning, or the one
// of its file. If there is none, setInitialTuning measures one and saves it.
func (g *Group) setInitialTuning(ctx context.Context) error {
	if g.Strategy() != Tuned {
		return nil
	}
	var mine *Tuning
	if g.cfg != nil {
		mine = g.cfg.Tuning
	}
	found, err := g.shareTuning(ctx, mine)
	if err != nil || found.Tuning != nil {
		return err
	}
	t, err := Tune(ctx, g, nil)
	if err != nil {
		return err
	}
	if g.hasRank(0) {
		if err := t.Save(ctx, found.Path); err != nil { // the group does not need the file
			slog.Warn("chorus: the measured tuning could not be saved: the next group measures again", "error", err)
		}
	}
	return nil
}

// SetTuning makes a group with the strategy Tuned use rank 0's t on all ranks. If t is
// empty, NCCL runs everything. If rank 0's t is nil, the group uses the entry of rank 0's
// TuningFile, or an empty Tuning if the file has none. If the Tuning was not made for such
// a group, all ranks return an error and the group is closed. Collective.
func SetTuning(ctx context.Context, g *Group, t *Tuning) error {
	const op = "set tuning"
	if err := g.check(op); err != nil {
		return err
	}
	if !slices.Contains(g.Strategies(), Tuned) {
		return badArgument(op, "the group has the strategies %v: make it with Tuned", g.Strategies())
	}
	found, err := g.shareTuning(ctx, t)
	if err == nil && found.Tuning == nil {
		g.routers.UseTuning(nil)
	}
	return err
}

// A sharedTuning is the message of rank 0 to the other ranks.
type sharedTuning struct {
	Tuning *route.Tuning // nil if the file has none
	Err    string
	Path   string // the file to write a new Tuning to
}

// shareTuning makes all ranks use rank 0's t, or the Tuning of its file if t is nil.
func (g *Group) shareTuning(ctx context.Context, t *Tuning) (x sharedTuning, err error) {
	at, err := g.sameSite(ctx)
	if err != nil {
		return x, err
	}
	if g.hasRank(0) {
		x = findTuning(t, at)
	}
	if err := BroadcastValue(ctx, g, 0, &x, JSON); err != nil {
		return x, err
	}
	if x.Err != "" {
		_ = g.Shutdown(ctx) // Close would end the other ranks before they have read the reason
		return x, errors.New(x.Err)
	}
	if x.Tuning == nil {
		return x, nil
	}
	if err := x.Tuning.Check(); err != nil { // JSON omits the parsed fields
		return x, err
	}
	g.routers.UseTuning(x.Tuning.Index())
	return x, nil
}

// findTuning returns t, or the Tuning of this process's file if t is nil.
func findTuning(t *Tuning, at route.Site) (x sharedTuning) {
	var err error
	if t != nil {
		if x.Tuning, err = t.routeTuning(); err == nil {
			err = errors.Join(x.Tuning.Fits(at), x.Tuning.Check())
		}
		if err != nil {
			err = fmt.Errorf("comm: the given tuning is not valid: %w", err)
		}
	} else if x.Path, err = route.TuningFile(); err == nil {
		x.Tuning, err = route.LoadTuning(x.Path, at)
	}
	if err != nil {
		return sharedTuning{Err: err.Error()}
	}
	return x
}
