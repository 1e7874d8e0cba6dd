package comm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/gochorus/chorus/internal/fabric"
)

// tuned gives a group that is Tuned what it goes by: all ranks rank 0's.
func (g *Group) tuned(ctx context.Context) error {
	if g.Strategy() != Tuned {
		return nil
	}
	at, err := g.sameSite(ctx)
	if err != nil {
		return err
	}
	var word tuningWord
	if g.hasRank(0) {
		word = g.ownTuning(at)
	}
	if err := g.agreeOn(ctx, &word); err != nil || word.Tuning != nil {
		return err
	}
	t, err := Tune(ctx, g, nil)
	if err != nil {
		return err
	}
	if g.hasRank(0) {
		if err := t.Save(ctx, word.Path); err != nil { // the group is as good without
			slog.Warn("chorus: what was measured serves this group only, and is measured again by the next", "error", err)
		}
	}
	return nil
}

// SetTuning makes a group that was made with Tuned go by rank 0's t, on all ranks; an
// empty one leaves everything to NCCL. One that does not hold for the group is an error
// on all ranks, and ends the group. Collective.
func SetTuning(ctx context.Context, g *Group, t *Tuning) error {
	return g.setTuning(ctx, func(at Site) tuningWord { return given(t, at) })
}

// FindTuning is SetTuning with what rank 0's TuningFile has for such a group: an empty
// one where it has none.
func FindTuning(ctx context.Context, g *Group) error {
	return g.setTuning(ctx, func(at Site) tuningWord {
		word := filed(at)
		if word.Tuning == nil {
			word.Tuning = &Tuning{}
		}
		return word
	})
}

func (g *Group) setTuning(ctx context.Context, find func(at Site) tuningWord) error {
	const op = "set tuning"
	if err := g.checkWait(op); err != nil {
		return err
	}
	if !slices.Contains(g.Strategies(), Tuned) {
		return refuse(op, "the group has the strategies %v: make it with Tuned", g.Strategies())
	}
	at, err := g.sameSite(ctx)
	if err != nil {
		return err
	}
	var word tuningWord
	if g.hasRank(0) {
		word = find(at)
	}
	return g.agreeOn(ctx, &word)
}

// A tuningWord is what rank 0 tells the others.
type tuningWord struct {
	Tuning *Tuning
	Err    string
	Path   string // where a Tuning is to be written that there is not yet
}

// agreeOn gives all ranks rank 0's word, and goes by it.
func (g *Group) agreeOn(ctx context.Context, word *tuningWord) error {
	if err := BroadcastValue(ctx, g, 0, word, JSON); err != nil {
		return err
	}
	if word.Err != "" {
		_ = g.Shutdown(ctx) // not Close, which would end others before they have read why
		return errors.New(word.Err)
	}
	if word.Tuning == nil {
		return nil
	}
	if err := word.Tuning.check(); err != nil { // JSON leaves out what it had read
		return err
	}
	g.adopt(word.Tuning)
	return nil
}

// given is the word on a Tuning of the program's.
func given(t *Tuning, at Site) tuningWord {
	t = t.clone()
	if err := errors.Join(t.fits(at), t.check()); err != nil {
		return tuningWord{Err: fmt.Sprintf("comm: the tuning given does not hold: %v", err)}
	}
	return tuningWord{Tuning: t}
}

// ownTuning is the word of this process.
func (g *Group) ownTuning(at Site) tuningWord {
	if g.cfg != nil && g.cfg.Tuning != nil {
		return given(g.cfg.Tuning, at)
	}
	return filed(at)
}

// filed is the word on the file of this process.
func filed(at Site) tuningWord {
	path, err := TuningFile()
	if err != nil {
		return tuningWord{Err: err.Error()}
	}
	t, err := LoadTuning(path, at)
	if err != nil {
		return tuningWord{Err: err.Error()}
	}
	return tuningWord{Tuning: t, Path: path}
}

// Site returns where a Tuning for the group holds.
func (g *Group) Site() (Site, error) {
	if g == nil {
		return Site{}, g.check("site")
	}
	dev := g.members[0].comm.Device()
	name, err := dev.Name()
	if err != nil {
		return Site{}, err
	}
	return Site{GPU: name, Ranks: g.size, Hosts: g.hosts(), Locals: len(g.members), Backend: dev.System().Backend(),
		Driver: dev.System().Libraries()[0].Version, NCCL: g.members[0].comm.Version(), Kernels: fabric.Version()}, nil
}

// hosts is how many hosts the ranks are on.
func (g *Group) hosts() int {
	if g.words == nil {
		return 1
	}
	seen := map[int]bool{}
	for rank := range g.size {
		if g.words.world != nil {
			rank = g.words.world[rank]
		}
		seen[g.words.hosts[rank]] = true
	}
	return len(seen)
}

// sameSite returns the site, or an error on all ranks where theirs are not alike.
func (g *Group) sameSite(ctx context.Context) (Site, error) {
	at, err := g.Site()
	if err != nil {
		return at, err
	}
	all, err := GatherValues(ctx, g, JSON, slices.Repeat([]Site{at}, len(g.members))...)
	if err != nil {
		return at, err
	}
	for rank, other := range all {
		if other != all[0] {
			_ = g.Shutdown(ctx) // not Close, which would end others before they have read why
			return at, refuse("tune", "rank 0 is at %+v and rank %d at %+v: a tuning is for ranks that are alike", all[0], rank, other)
		}
	}
	return at, nil
}
