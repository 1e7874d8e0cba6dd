package comm

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Config are the options of Local and Join; nil means the defaults. They must be the same
// on all ranks.
type Config struct {
	// NCCL are the options of the ranks' communicators, including the timeout of an
	// operation (Timeout) and the size of the flight recorder. Recoverable is refused: a
	// group that fails aborts its communicators.
	NCCL *nccl.Config
	// HighPriority makes the group's streams run before streams with the default priority
	// (is_high_priority_stream of ProcessGroupNCCL.Options). Groups of Split and Sub do as
	// their parent.
	HighPriority bool
	// Deterministic makes the bits of reductions independent of everything except the inputs.
	// nil means that they may depend on sizes, algorithms and strategies. See Order.
	Deterministic *Order
	// Strategy selects the algorithms of the collectives.
	Strategy Strategy
	// Tuning is used by a group with the strategy Tuned. Rank 0's Tuning, or else rank 0's
	// file, applies to all ranks. nil means the file, or a measurement if the file has no
	// matching Tuning.
	Tuning *Tuning
}

func (c *Config) check(op string) error {
	if c != nil && c.NCCL != nil && c.NCCL.Recoverable {
		return badArgument(op, "NCCL.Recoverable is set, but a group that fails aborts its communicators: make them with nccl.NewCommunicator to Shrink them")
	}
	if c == nil {
		return nil
	}
	return c.Deterministic.check(op)
}

// nccl returns the options of a communicator, with onFailure called before the user's
// callback.
func (c *Config) nccl(onFailure func(*nccl.Communicator, error) error) *nccl.Config {
	n := nccl.Config{}
	if c != nil && c.NCCL != nil {
		n = *c.NCCL
	}
	if users := n.OnFailure; users != nil && onFailure != nil {
		n.OnFailure = func(x *nccl.Communicator, err error) error {
			if better := onFailure(x, err); better != nil {
				err = better
			}
			if better := users(x, err); better != nil {
				err = better
			}
			return err
		}
	} else if onFailure != nil {
		n.OnFailure = onFailure
	}
	return &n
}

// newStream makes the stream of a local rank.
func (c *Config) newStream(dev *device.Device) (*stream.Stream, error) {
	if c == nil || !c.HighPriority {
		return stream.New(dev, nil)
	}
	_, greatest, err := stream.PriorityRange(dev)
	if err != nil {
		return nil, err
	}
	return stream.New(dev, &stream.Config{Priority: greatest})
}
