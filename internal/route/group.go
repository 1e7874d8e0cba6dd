package route

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/safe"
)

// A Group is the inside of a comm.Group: what packages above comm use of it, and users do not see. comm.Group embeds the bridge
// that [GroupOf] follows.
type Group interface {
	// Check returns an error if the group is nil, closed or broken.
	Check(op string) error
	// CheckSame returns an error on all ranks if the processes have given different arguments.
	// Collective.
	CheckSame(ctx context.Context, op, given string) error
	// Exchange returns the messages of all ranks, by rank. mine are those of the local ranks. Collective.
	Exchange(ctx context.Context, mine [][]byte) ([][]byte, error)
	// Conclude returns err, which all ranks have found in the messages of an Exchange, once all ranks have the messages: a
	// rank that closed the group before would end the exchange of the others.
	Conclude(ctx context.Context, err error) error
	// Chosen returns the name of the strategy that the group uses for x.
	Chosen(x collective.Op) string
	// UseWhole is comm.Group.Use with the strategy of this name, but the group uses it for all
	// sizes that it supports, even if it is slow for them. Measurements need that.
	UseWhole(ctx context.Context, strategy string) error
	// TunePlan returns the measurements that comm.Tune will make, without times.
	TunePlan(cfg PlanConfig) ([]Choice, error)
	// Fail breaks the group with a cause and returns the error of later calls. It aborts
	// pending operations, so that no rank waits for this one.
	Fail(cause error) error
	// Rendezvous returns what the processes of the group have joined by, or nil in one process.
	Rendezvous() any
	// NewBatch returns a batch of nccl's operations that the backends of the group's strategy
	// execute. comm's functions enqueue their operations in the same way. The caller adds
	// operations of local ranks on the group's streams. It may use several batches
	// concurrently, because they do not take the group's lock.
	NewBatch() *Batch
}

// GroupOf returns the inside of a comm.Group, which must not be nil.
func GroupOf(g handle.Has[Group]) Group { return *handle.Of(g) }

// Agree exchanges a value of each rank, or why the rank cannot go on, and returns on every rank what judge returns. mine and
// failed are those of the local ranks; a nil failed means that none has failed. judge gets what all ranks have said, by
// rank, and must find an error on all ranks or on none. An error of the exchange itself includes the failures of
// this process. Collective.
func Agree[T any](ctx context.Context, g handle.Has[Group], op string, mine []T, failed []error, judge func(all []collective.Said[T]) error) error {
	texts := make([][]byte, len(mine))
	var err error
	for i := range mine {
		var own error
		if failed != nil {
			own = failed[i]
		}
		var b bytes.Buffer
		err = errors.Join(err, gob.NewEncoder(&b).Encode(collective.SaidOf(mine[i], own)))
		texts[i] = b.Bytes()
	}
	if err == nil {
		texts, err = GroupOf(g).Exchange(ctx, texts)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, errors.Join(errors.Join(failed...), err))
	}
	all := make([]collective.Said[T], len(texts))
	for rank, text := range texts {
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&all[rank]); err != nil {
			return fmt.Errorf("%s: what rank %d has said: %w", op, rank, err)
		}
		for _, s := range []*string{&all[rank].Failed, &all[rank].Feature, &all[rank].Need, &all[rank].Have} {
			*s = safe.Text(*s) // a value may have names, which must stay as they are
		}
	}
	return GroupOf(g).Conclude(ctx, judge(all))
}

// OpenLocal opens the device of a process: the one with the ordinal of its local rank of n, or
// the only one that it sees, as under Slurm. Ranks that share GPUs take them in turns.
func OpenLocal(sys *device.System, local, n int) (*device.Device, error) {
	devs := sys.Devices()
	if len(devs) == 1 || ncclapi.SharesGPUs() && len(devs) > 0 {
		return devs[local%len(devs)], nil
	}
	dev, err := sys.Open(local)
	if err != nil {
		return nil, fmt.Errorf("%w: each of the %d processes on this host needs a device: start at most %d", err, n, len(devs))
	}
	return dev, nil
}
