package training

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
)

// A Resume is an example that continues.
type Resume struct {
	Folder  string                              // of its checkpoints
	Steps   int                                 // of the whole training
	Restore func(saved *checkpoint.Saved) error // restores the state of the local ranks
	Print   func(format string, args ...any)    // prints a line; only the process of rank 0 calls it
}

// Run restores the newest complete checkpoint and returns its step, or 0 if the folder has no
// checkpoint. It is an error if all checkpoints are damaged, because the training would begin
// again and replace them. Collective.
func (t *Resume) Run(ctx context.Context, g *comm.Group) (step int, err error) {
	print := t.Print
	if g.Rank() != 0 {
		print = func(string, ...any) {}
	}
	saved, skipped, err := checkpoint.Latest(ctx, g, t.Folder)
	for _, x := range skipped {
		print("skipped %s: %s", x.Folder, strings.ReplaceAll(x.Reason, "\n", "; "))
	}
	switch {
	case err != nil:
		return 0, err
	case saved == nil && len(skipped) > 0:
		return 0, fmt.Errorf("resume: none of the %d checkpoints in %s is complete: see chorus checkpoint verify %s, or start without -resume", len(skipped), t.Folder, t.Folder)
	case saved == nil:
		print("no checkpoint in %s: starting at step 1", t.Folder)
		return 0, nil
	}
	defer func() { err = errors.Join(err, saved.Close()) }()
	if err := t.Restore(saved); err != nil {
		return 0, err
	}
	if step = int(saved.Step()); step >= t.Steps {
		print("the training is complete: %s has step %d of %d", saved.Folder(), step, t.Steps)
		return step, nil
	}
	print("resumed at step %d from %s", step, saved.Folder())
	return step, nil
}
