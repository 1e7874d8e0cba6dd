package comm

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// Local makes a group of which all ranks are in this process: rank i on devs[i],
// or one rank on each device of the default system when none is given
// (ncclCommInitAll). It returns when the communicators are ready, or with the
// cause when ctx ends before.
func Local(ctx context.Context, devs ...*device.Device) (*Group, error) {
	return LocalWith(ctx, nil, devs...)
}

// LocalWith is Local with options.
func LocalWith(ctx context.Context, cfg *Config, devs ...*device.Device) (*Group, error) {
	if err := cfg.check("local"); err != nil {
		return nil, err
	}
	strategy, err := cfg.strategy()
	if err != nil {
		return nil, err
	}
	if len(devs) == 0 {
		if devs, err = device.All(); err != nil {
			return nil, err
		}
	}
	if err := distinct(devs); err != nil {
		return nil, err
	}
	id, err := nccl.NewUniqueID(devs[0])
	if err != nil {
		return nil, fmt.Errorf("comm: local: %w", err)
	}
	comms := make([]*nccl.Communicator, len(devs))
	// The first rank that fails ends the wait of the others for it.
	eg, all := errgroup.WithContext(ctx)
	for i, d := range devs {
		eg.Go(func() (err error) {
			comms[i], err = nccl.NewCommunicator(all, d, id, i, len(devs), cfg.nccl(nil))
			if err != nil {
				comms[i] = nil
			}
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		for _, c := range comms {
			err = errors.Join(err, c.Close())
		}
		return nil, fmt.Errorf("comm: local: %w", err)
	}
	g, err := newGroup(comms, cfg)
	if err != nil {
		return nil, err
	}
	err = g.openWays(ctx, strategy, fabric.NewTable(len(devs)).Seat)
	if err == nil {
		err = g.tuned(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func distinct(devs []*device.Device) error {
	for i, d := range devs {
		if d == nil {
			return refuse("local", "device %d of %d is nil", i, len(devs))
		}
		for j := range i {
			if devs[j] == d {
				return refuse("local", "ranks %d and %d are both on %s: a device holds one rank", j, i, d)
			}
			if devs[j].System() != d.System() {
				return refuse("local", "ranks %d and %d are on devices of two systems", j, i)
			}
		}
	}
	return nil
}
