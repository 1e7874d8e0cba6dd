package comm

import (
	"context"
	"encoding/json"

	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/nccl"
)

// maxNaNReport is the maximum size of the report of a NaN, in bytes.
const maxNaNReport = 4096

func (w *reporter) nanKey() string { return w.prefix + "nan" }

// reportNaN tells the other processes that the input of a local rank was not a number: they may
// have completed the operation, and would not notice.
func (w *reporter) reportNaN(e *nccl.NaNError) {
	ctx, cancel := context.WithTimeout(context.Background(), lastReportTime)
	defer cancel()
	_ = put(ctx, w.r, w.nanKey(), e) // if the store is gone, the job has ended
}

// awaitNaN calls fail with the first NaN that another process reports, until ctx ends.
func (w *reporter) awaitNaN(ctx context.Context, c *nccl.Communicator, fail func(error) error) {
	b, ok := w.await(ctx, w.nanKey())
	if !ok {
		return // the group ends
	}
	if e := readNaN(b, c.Rank(), c.Size()); e != nil {
		w.nan <- e // for a failure that the end of the other rank causes at the same time
		_ = fail(e)
	}
}

// readNaN returns the error in the report of another rank, or nil if the report is invalid or
// this rank's own.
func readNaN(b []byte, rank, size int) *nccl.NaNError {
	e := new(nccl.NaNError)
	if len(b) > maxNaNReport || json.Unmarshal(b, e) != nil || e.Rank < 0 || e.Rank >= size || e.Rank == rank || e.Size != size || e.Index < 0 {
		return nil
	}
	e.Device, e.Operation = plain.Text(e.Device), plain.Text(e.Operation)
	return e
}
