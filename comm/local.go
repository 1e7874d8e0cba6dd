package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// Local makes a group whose ranks are all in this process: rank i on devs[i]
// (ncclCommInitAll). If devs is nil, it uses all devices of the default system. It returns
// when the communicators are ready, or with the cause when ctx ends first. The first group on a device loads NCCL's
// kernels, for which the driver may wait for all work of the device.
func Local(ctx context.Context, devs []*device.Device, cfg *Config) (*Group, error) {
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
	comms, err := nccl.NewCommunicators(ctx, devs, cfg.nccl(nil))
	if err != nil {
		return nil, fmt.Errorf("comm: local: %w", err)
	}
	g, err := newGroup(comms, cfg)
	if err != nil {
		return nil, err
	}
	err = g.openRouters(ctx, strategy, nil, fabric.NewTable(len(devs)).Seat)
	if err == nil {
		err = g.setInitialTuning(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func distinct(devs []*device.Device) error {
	for i, d := range devs {
		if d == nil {
			return badArgument("local", "device %d of %d is nil", i, len(devs))
		}
		for j := range i {
			if devs[j] == d {
				return badArgument("local", "ranks %d and %d are both on %s: NCCL refuses several communicators of a process on one device; for tests, %s=yes permits one process for each rank", j, i, d, env.ShareGPUs.Name)
			}
			if devs[j].System() != d.System() {
				return badArgument("local", "ranks %d and %d are on devices of two systems", j, i)
			}
		}
	}
	return nil
}
