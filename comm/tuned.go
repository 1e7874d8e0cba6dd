package comm

import (
	"context"
	"errors"
	"fmt"
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
	var word struct {
		Tuning *Tuning
		Err    string
		Path   string
	}
	if g.hasRank(0) {
		var err error
		if word.Tuning, word.Path, err = g.ownTuning(at); err != nil {
			word.Err = err.Error()
		}
	}
	if err := BroadcastValue(ctx, g, 0, &word, JSON); err != nil {
		return err
	}
	if word.Err != "" {
		_ = g.Shutdown(ctx) // not Close, which would end others before they have read why
		return errors.New(word.Err)
	}
	if word.Tuning != nil {
		if err := word.Tuning.check(); err != nil { // JSON leaves out what it had read
			return err
		}
		g.adopt(word.Tuning)
		return nil
	}
	t, err := Tune(ctx, g, nil)
	if err == nil && g.hasRank(0) {
		err = t.Save(word.Path)
	}
	return err
}

// ownTuning is that of this process: nil where one is to be measured and written to path.
func (g *Group) ownTuning(at Site) (t *Tuning, path string, err error) {
	if g.cfg != nil && g.cfg.Tuning != nil {
		t = g.cfg.Tuning
		if err := errors.Join(t.fits(at), t.check()); err != nil {
			return nil, "", fmt.Errorf("comm: Config.Tuning: %w", err)
		}
		return t, "", nil
	}
	if path, err = TuningFile(); err != nil {
		return nil, "", err
	}
	t, err = LoadTuning(path, at)
	return t, path, err
}

// Site returns where a Tuning for the group holds.
func (g *Group) Site() (Site, error) {
	dev := g.members[0].comm.Device()
	name, err := dev.Name()
	if err != nil {
		return Site{}, err
	}
	return Site{GPU: name, Ranks: g.size, Locals: len(g.members), Backend: dev.System().Backend(),
		Driver: dev.System().Libraries()[0].Version, NCCL: g.members[0].comm.Version(), Kernels: fabric.Version()}, nil
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
			return at, fmt.Errorf("comm: tune: rank 0 is at %+v and rank %d at %+v: a tuning is for ranks that are alike: %w", all[0], rank, other, ErrMismatch)
		}
	}
	return at, nil
}
