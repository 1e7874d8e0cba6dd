package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/nancheck"
)

// A NaNError reports an operation whose input has an element that is not a number
// (Config.NaNCheck). The communicator has failed with it. Unlike torch, which stops the kernel with
// a trap and loses the device, Chorus lets the operation run; its outputs are undefined on all
// ranks.
type NaNError struct {
	Rank, Size int
	Device     string
	Record     uint64 // number of the operation on the communicator, from 1
	Operation  string // such as "ncclAllReduce(8 x float32, sum) as collective 7"
	Index      int    // of the first such element of the rank's input
}

func (e *NaNError) Error() string {
	return fmt.Sprintf("nccl: %s on rank %d of %d (%s), its operation %d: element %d of the input is not a number (NaN): the outputs are undefined on all ranks",
		e.Operation, e.Rank, e.Size, e.Device, e.Record, e.Index)
}

// nanCheck reports whether a configuration asks for checks.
func (c *Config) nanCheck() (bool, error) {
	word, err := env.NCCLNaNCheck.OneOf("0", "1")
	return c != nil && c.NaNCheck || word == "1", err
}

// openNaNCheck makes the checker of a communicator, if the configuration asks for one.
func (c *Communicator) openNaNCheck() (err error) {
	if c.checksNaN {
		c.nan, err = nancheck.New(c.dev)
	}
	return err
}

// checkInput enqueues the check of the operation's input, if there is something to check.
func (o *operation) checkInput() error {
	if c := o.comm; c.nan != nil && nancheck.Checks(o.DType) && o.src.ptr != 0 {
		return c.nan.Check(o.Stream, uint64(o.src.ptr), o.src.len, o.DType, o.Record)
	}
	return nil
}

// checkInputs is checkInput for the operations of a group. If it fails, nothing stays recorded.
func (g *group) checkInputs() error {
	for i := range g.ops {
		if err := g.ops[i].checkInput(); err != nil {
			for j := len(g.ops) - 1; j >= 0; j-- {
				g.ops[j].unrecord()
			}
			return err
		}
	}
	return nil
}

// foundNaN returns the error of the first operation with a NaN so far, or nil.
func (c *Communicator) foundNaN() error {
	if c.nan == nil {
		return nil
	}
	record, index, found := c.nan.Found()
	if !found {
		return nil
	}
	e := &NaNError{Rank: c.rank, Size: c.size, Device: c.dev.String(), Record: record, Operation: "an operation that the flight recorder no longer has", Index: index}
	if x := c.rec.Entry(record); x.ID == record {
		e.Operation = x.Operation().String()
	}
	return e
}
