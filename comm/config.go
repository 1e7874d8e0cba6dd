package comm

import "github.com/gochorus/chorus/nccl"

// Config are the options of LocalWith and JoinWith; nil means the defaults. They must
// be the same on all ranks.
type Config struct {
	// NCCL are the options of the ranks' communicators, among them how long an
	// operation may take (Timeout) and what the flight recorder keeps. Recoverable is
	// refused: a group that fails aborts its communicators.
	NCCL *nccl.Config
	// Strategy says what carries the collectives out.
	Strategy Strategy
	// Tuning is what a group that is Tuned goes by: rank 0's counts, or rank 0's file, so
	// that all ranks have the same. nil is that of the file, or one that is measured.
	Tuning *Tuning
}

func (c *Config) check(op string) error {
	if c != nil && c.NCCL != nil && c.NCCL.Recoverable {
		return refuse(op, "NCCL.Recoverable is set, but a group that fails aborts its communicators: make them with nccl.NewCommunicator to Shrink them")
	}
	return nil
}

// nccl returns the options of a communicator, with what is done when it fails.
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
