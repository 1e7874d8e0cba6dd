package comm

import (
	"fmt"

	"github.com/gochorus/chorus/internal/env"
)

// A Strategy says what carries a group's collectives out.
type Strategy uint8

// The strategies.
const (
	// ByEnvironment is what CHORUS_COMM_STRATEGY says: nccl, which is the default, or own.
	ByEnvironment Strategy = iota
	// NCCLOnly is NCCL for everything.
	NCCLOnly
	// OwnKernels is Chorus's own kernels for small all-reduces, all-gathers,
	// reduce-scatters, broadcasts and all-to-alls, where all ranks are GPUs of one host
	// that reach each other's memory, at most 8 of them, and NCCL for everything else.
	// Each rank then has 16 MiB of device memory for them, which counts as allocated.
	// While such an operation waits for other ranks, its kernel keeps the device busy.
	// All ranks have the same bits. Groups of Split have NCCL alone.
	//
	// They are for what is on the group's streams, by itself or as its rank's only
	// collective in a group of NCCL. A rank's operations run one after the other, as
	// with NCCL: a graph that has captured some, on whatever stream it is launched, comes
	// after those before and before those after. Close waits until the streams that have
	// had such operations are past their work.
	OwnKernels
	strategies
)

var strategyNames = [strategies]string{"by environment", "nccl", "own"}

// String returns the name that CHORUS_COMM_STRATEGY has for it.
func (s Strategy) String() string {
	if s < strategies {
		return strategyNames[s]
	}
	return fmt.Sprintf("Strategy(%d)", uint8(s))
}

// Strategy returns what carries the group's collectives out: OwnKernels only where they
// could be had.
func (g *Group) Strategy() Strategy {
	if g.members[0].own != nil {
		return OwnKernels
	}
	return NCCLOnly
}

// strategy is that of the configuration, or the environment's.
func (c *Config) strategy() (Strategy, error) {
	if c != nil && c.Strategy != ByEnvironment {
		if c.Strategy >= strategies {
			return 0, fmt.Errorf("comm: there is no %s: %w", c.Strategy, ErrMismatch)
		}
		return c.Strategy, nil
	}
	name, err := env.CommStrategy.OneOf(strategyNames[NCCLOnly], strategyNames[OwnKernels])
	if err == nil && name == strategyNames[OwnKernels] {
		return OwnKernels, nil
	}
	return NCCLOnly, err
}
