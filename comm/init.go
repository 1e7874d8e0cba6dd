package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/groups"
)

// InitConfig are the options of Init; nil means the defaults.
type InitConfig struct {
	// Group are the options of the group, as for Local and Join.
	Group *Config
	// Fallback permits virtual devices if CHORUS_BACKEND permits them and no GPU is visible.
	// Init then calls it on rank 0 with one line that the program must show to its user. nil
	// means that a missing GPU is an error.
	Fallback func(note string)
	// AllDevices gives a job of one process a rank on each device, as Local does. The
	// default is one rank on the first device. In a job of several processes each process
	// always has one rank.
	AllDevices bool
}

// Init joins this process to the job that started it and returns the group of all
// processes of the job. It mirrors torch.distributed.init_process_group. Init is
// cluster.Attach, the choice of the device, and Join in one call: the rank uses the device
// with the ordinal of its local rank, or the only device that the process sees. A process
// that no launcher has started gets a group of one rank, or of all devices; see InitConfig.
//
// Init returns when all processes have called it, or with the cause when ctx ends. If one
// process fails, Init closes the session and the group, and returns an error in all processes
// that names the failed rank. Shutdown and Close end the group and the session. Init can be
// called once in a process, like cluster.Attach.
func Init(ctx context.Context, cfg *InitConfig) (*Group, error) {
	if cfg == nil {
		cfg = new(InitConfig)
	}
	if err := cfg.Group.check("init"); err != nil {
		return nil, err
	}
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return nil, fmt.Errorf("comm: init: attach to the job: %w", err)
	}
	i := &initializing{cfg: cfg, sess: sess}
	g, err := i.group(ctx)
	if err != nil {
		return nil, errors.Join(err, sess.Close(), i.virtual.Close())
	}
	g.session = sess
	return g, nil
}

// Session returns the session that Init has opened, with the job's store and members. It
// belongs to the group: do not close it. Session returns nil for a group of Join, Local or
// Split.
func (g *Group) Session() *cluster.Session {
	if g == nil {
		return nil
	}
	return g.session
}

// An initializing is one call of Init after this process has attached to its job.
type initializing struct {
	cfg     *InitConfig
	sess    *cluster.Session
	virtual *device.System // the devices of a fallback, or nil
}

func (i *initializing) group(ctx context.Context) (*Group, error) {
	if i.cfg.AllDevices && i.sess.Size() == 1 {
		sys, err := i.system()
		if err != nil {
			return nil, fmt.Errorf("comm: init: open the devices: %w", err)
		}
		return Local(ctx, sys.Devices(), i.cfg.Group)
	}
	// join reports a failure of device to the other ranks, which already wait for this one.
	return join(ctx, i.sess, i.device, i.cfg.Group)
}

// system opens the devices of this process.
func (i *initializing) system() (*device.System, error) {
	if i.cfg.Fallback == nil {
		sys, err := device.Default()
		if err != nil && env.Backend.Value() != "virtual" {
			err = fmt.Errorf("%w\n%s=virtual selects virtual devices", err, env.Backend.Name)
		}
		return sys, err
	}
	sys, note, err := device.OrVirtual()
	if err != nil || note == "" {
		return sys, err
	}
	i.virtual = sys
	if i.sess.Rank() == 0 {
		i.cfg.Fallback(note)
	}
	return sys, nil
}

// device opens the device of this rank.
func (i *initializing) device() (*device.Device, error) {
	sys, err := i.system()
	if err != nil {
		return nil, fmt.Errorf("open the devices: %w", err)
	}
	return groups.OpenLocal(sys, i.sess.LocalRank(), i.sess.LocalSize())
}
