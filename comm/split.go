package comm

import (
	"context"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/nccl"
)

// NoColor is the color of a rank that does not join any group of Split.
const NoColor = -1

// Split makes one group for each color (ncclCommSplit). colors has an entry for each local
// rank: a color from 0 on, or NoColor. In a new group the ranks are ordered by their keys,
// then as in g; nil keys are all equal. Colors and keys have 32 bits. Split returns the
// group of each local rank, by local rank: the same group for ranks of the same color, nil
// for NoColor.
//
// It returns when all ranks have called it, or with the cause when ctx ends first. The
// groups have their own streams and stay usable when g is closed. They are broken when one
// of their ranks, or a process of g's Rendezvous, is lost. Operations on groups that share
// a device must be issued in the same order on all ranks. Collective.
func (g *Group) Split(ctx context.Context, colors, keys []int) ([]*Group, error) {
	const op = "split"
	if err := g.check(op); err != nil {
		return nil, err
	}
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseCapture("comm: "+op, "split the group before the capture"); err != nil {
			return nil, err
		}
	}
	keys, err := g.checkColors(op, colors, keys)
	if err != nil {
		return nil, err
	}
	g.splits++
	watchers := make([]*reporter, len(colors))
	comms := make([]*nccl.Communicator, len(colors))
	eg, all := errgroup.WithContext(ctx)
	for i := range g.members {
		if g.reporter != nil {
			watchers[i] = &reporter{r: g.reporter.r, hosts: g.reporter.hosts, prefix: fmt.Sprintf("%ssplit/%d/%d/", g.reporter.prefix, g.splits, colors[i])}
		}
		eg.Go(func() (err error) {
			comms[i], err = g.members[i].comm.Split(all, colors[i], keys[i], g.childConfig(watchers[i]))
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		for _, c := range comms {
			_ = c.Close() // the earlier error is returned
		}
		return nil, g.breakIfRefused(fmt.Errorf("comm: %s: %w", op, err))
	}
	return g.children(ctx, colors, comms, watchers)
}

// checkColors validates the arguments of Split, and returns the keys.
func (g *Group) checkColors(op string, colors, keys []int) ([]int, error) {
	if len(colors) != len(g.members) || keys != nil && len(keys) != len(g.members) {
		return nil, fmt.Errorf("comm: %s: %d colors and %d keys for %d local ranks: %w", op, len(colors), len(keys), len(g.members), ErrMismatch)
	}
	if keys == nil {
		keys = make([]int, len(colors))
	}
	for i, color := range colors {
		if color < NoColor || color > math.MaxInt32 || keys[i] < math.MinInt32 || keys[i] > math.MaxInt32 {
			return nil, badArgument(op, "color %d and key %d of local rank %d: want NoColor or a color from 0 to %d, and a key of 32 bits", color, keys[i], i, math.MaxInt32)
		}
	}
	return keys, nil
}

// childConfig leaves the name empty, because package nccl gives each child a different
// name.
func (g *Group) childConfig(w *reporter) *nccl.Config {
	n := g.cfg.nccl(w.onFailure())
	n.Name = ""
	return n
}

// children makes the groups of communicators.
func (g *Group) children(ctx context.Context, colors []int, comms []*nccl.Communicator, watchers []*reporter) ([]*Group, error) {
	groups := make([]*Group, len(colors))
	for i, c := range comms {
		if c == nil || groups[i] != nil {
			continue
		}
		var mine []*nccl.Communicator
		var at []int
		for j := i; j < len(comms); j++ {
			if colors[j] == colors[i] {
				mine, at = append(mine, comms[j]), append(at, j)
			}
		}
		slices.SortFunc(mine, func(a, b *nccl.Communicator) int { return a.Rank() - b.Rank() })
		child, err := newGroup(mine, g.cfg)
		if err == nil {
			err = child.openRouters(ctx, route.NCCLOnly, nil, nil)
		}
		if err == nil && g.reporter != nil {
			err = child.watchChild(ctx, watchers[i])
		}
		if err != nil {
			_ = child.Close()
			for j, made := range groups {
				if _ = made.Close(); made == nil && comms[j] != nil {
					_ = comms[j].Close()
				}
			}
			return nil, err
		}
		for _, j := range at {
			groups[j] = child
		}
	}
	return groups, nil
}

// Sub makes a group of some ranks, which get the new ranks 0, 1, 2... in the order of the
// list (torch.distributed.new_group). All ranks of g must call it with the same list, or
// all get an error. It returns nil if none of the ranks is local. Otherwise Sub behaves
// like Split. Collective.
func (g *Group) Sub(ctx context.Context, ranks ...int) (*Group, error) {
	const op = "sub-group"
	if err := g.checkSame(ctx, op, fmt.Sprint("the ranks ", ranks), sameArguments); err != nil {
		return nil, err
	}
	for i, r := range ranks {
		if r < 0 || r >= g.size || slices.Contains(ranks[:i], r) {
			return nil, fmt.Errorf("comm: %s: rank %d does not exist or is given twice: want different ranks below %d: %w", op, r, g.size, ErrMismatch)
		}
	}
	colors, keys := make([]int, len(g.members)), make([]int, len(g.members))
	for i := range g.members {
		keys[i] = slices.Index(ranks, g.members[i].comm.Rank())
		if colors[i] = 0; keys[i] < 0 {
			colors[i], keys[i] = NoColor, 0
		}
	}
	groups, err := g.Split(ctx, colors, keys)
	if err != nil {
		return nil, err
	}
	for _, sub := range groups {
		if sub != nil {
			return sub, nil
		}
	}
	return nil, nil
}
