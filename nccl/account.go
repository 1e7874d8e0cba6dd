package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// account lets memory.Ledger show the memory that NCCL has allocated for c. It does nothing
// if the loaded NCCL has no such statistic.
func (c *Communicator) account() {
	if c.api.Has(ncclapi.FuncCommMemStats) {
		c.unaccount = mem.Account(c.dev, c.use)
	}
}

// use returns NCCL's memory for c, unless another call of NCCL is in progress.
func (c *Communicator) use() (u mem.Use, known bool) {
	if !c.mu.TryLock() {
		return u, false
	}
	defer c.mu.Unlock()
	if !c.life.TryRLock() { // Shutdown frees the communicator
		return u, false
	}
	defer c.life.RUnlock()
	if !c.alive() {
		return u, false
	}
	bytes, suspended, r := uint64(0), uint64(0), ncclapi.Success
	stat, state := ncclapi.StatGPUMemTotal, ""
	err := relaxed(c.dev, func() error {
		if suspended, r = c.api.CommMemStats(*c.h, ncclapi.StatGPUMemSuspended); suspended != 0 {
			stat, state = ncclapi.StatGPUMemPersist, ", suspended"
		}
		if r == ncclapi.Success {
			bytes, r = c.api.CommMemStats(*c.h, stat)
		}
		return nil
	})
	u = mem.Use{Owner: fmt.Sprintf("NCCL, communicator %d, rank %d of %d%s", c.number, c.rank, c.size, state), Bytes: bytes}
	return u, err == nil && r == ncclapi.Success
}
