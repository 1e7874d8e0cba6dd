package comm

import (
	"fmt"
	"os"

	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/ras"
	"github.com/gochorus/chorus/nccl"
)

// askService asks NCCL's RAS service about the ranks of a communicator. The channel receives its
// findings, and is closed if there are none. The call returns at once.
func (w *reporter) askService(c *nccl.Communicator) <-chan []string {
	found := make(chan []string, 1)
	addr := serviceAddress(c)
	if addr == "" || !analyst(c.Rank(), c.Size()) {
		close(found)
		return found
	}
	world := w.worldRanks()
	go func() {
		defer close(found)
		a, err := ras.Ask(addr)
		if err != nil {
			return // the service is older, disabled, or another program has its port
		}
		mine := a.Of(c.Rank(), c.Size(), os.Getpid())
		found <- mine.Findings(func(x *ras.Communicator, rank int) string {
			if len(mine.Communicators) > 1 { // this process has the same rank in several groups of the size
				return fmt.Sprintf("rank %d of communicator %s", rank, x.Hash)
			}
			return fmt.Sprint("rank ", world[rank])
		})
	}()
	return found
}

// serviceAddress returns the address of a communicator's service, or "" if there is none to ask.
func serviceAddress(c *nccl.Communicator) string {
	return ras.Address(c.Device().System().Backend() == backend.Virtual)
}
