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
	go func() {
		defer close(found)
		a, err := ras.Ask(addr)
		if err != nil {
			return // the service is older, disabled, or another program has its port
		}
		world := w.worldRanks()
		found <- a.Of(c.Rank(), c.Size(), os.Getpid()).Findings(func(_ *ras.Communicator, rank int) string {
			return fmt.Sprint("rank ", world[rank])
		})
	}()
	return found
}

// serviceAddress returns the address of a communicator's service, or "" if there is none to ask.
func serviceAddress(c *nccl.Communicator) string {
	return ras.Address(c.Device().System().Backend() == backend.Virtual)
}
