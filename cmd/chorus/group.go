package main

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/launch"
)

// ranksOf returns the devices that a command works on, and what it should say about
// them: of a job of several processes the one of this process, and otherwise gpus of
// this machine, 0 being all.
func ranksOf(sess *cluster.Session, gpus int) ([]*device.Device, string, error) {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return nil, "", err
	}
	if sess.Size() > 1 {
		if gpus > 1 {
			return nil, "", &launch.UsageError{Reason: fmt.Sprintf("-g %d in a job of %d processes: each has one GPU; leave -g out", gpus, sess.Size())}
		}
		dev, err := sys.Open(sess.LocalRank())
		return []*device.Device{dev}, note, err
	}
	devs := sys.Devices()
	if gpus > len(devs) {
		return nil, "", &launch.UsageError{Reason: fmt.Sprintf("-g %d: this machine has %d devices", gpus, len(devs))}
	}
	if gpus > 0 {
		devs = devs[:gpus]
	}
	return devs, note, nil
}

// joinRanks makes the group of the devices of ranksOf.
func joinRanks(ctx context.Context, sess *cluster.Session, devs []*device.Device, cfg *comm.Config) (*comm.Group, error) {
	if sess.Size() > 1 {
		return comm.JoinWith(ctx, sess, devs[0], cfg)
	}
	return comm.LocalWith(ctx, cfg, devs...)
}
