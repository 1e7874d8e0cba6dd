package route

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/memory"
)

// A PlanConfig has the options of a plan. Zero values mean the defaults.
type PlanConfig struct {
	MaxBytes int // the largest size, of an all-reduce or of one rank's part
	Types    []memory.DType
	Ops      []flight.Reduction
}

// wholeBytes is the default of the largest measured size, unless the device's memory is
// less than 64 times as much, or the device is virtual.
const (
	wholeBytes        = 1 << 30
	wholeBytesVirtual = 256
)

// oddBytes is the maximum of the measured sizes that are not multiples of 16 bytes.
const oddBytes = 4 << 20

// engineBytes is the minimum size for measuring copy engines: smaller copies take equally
// long.
const engineBytes = 256 << 10

// Plan returns the measurements of a tuning: the possible strategies for each operation,
// without times. It returns none if NCCL is the only possibility.
func (rs Routers) Plan(c PlanConfig) ([]Choice, error) {
	if c.Types == nil {
		c.Types = []memory.DType{memory.Float32, memory.BFloat16}
	}
	if c.Ops == nil {
		c.Ops = []flight.Reduction{flight.Sum, flight.Max}
	}
	if c.MaxBytes != 0 && c.MaxBytes < 16 {
		return nil, fmt.Errorf("MaxBytes is %d: want 16 or more", c.MaxBytes)
	}
	for _, t := range c.Types {
		if t.Size() == 0 || t == memory.Bool {
			return nil, fmt.Errorf("type %s: want numbers", t)
		}
	}
	for _, op := range c.Ops {
		if !slices.Contains(tunedOps, op) {
			return nil, fmt.Errorf("there is no reduction %s", op)
		}
	}
	if len(rs) == 0 {
		return nil, nil
	}
	all, part := c.MaxBytes, c.MaxBytes
	if c.MaxBytes == 0 {
		var err error
		if all, err = rs[0].wholeBytes(); err != nil {
			return nil, err
		}
		part = max(all/rs[0].comm.Size(), 16)
	}
	return c.choices(rs[0], all, part), nil
}

// wholeBytes returns the default of the largest measured size.
func (k *Router) wholeBytes() (int, error) {
	if k.virtual() {
		return wholeBytesVirtual, nil
	}
	_, total, err := k.comm.Device().MemoryInfo()
	return int(min(wholeBytes, total/64)), err
}

// virtual reports whether times are meaningless because the devices are virtual.
func (k *Router) virtual() bool { return gpu.DeviceOf(k.comm.Device()).System().Machine != nil }

// choices returns all operations, up to all bytes of an all-reduce or a broadcast and up to
// part bytes of one rank's part.
func (c *PlanConfig) choices(k *Router, all, part int) (list []Choice) {
	for _, kind := range tunedKinds {
		most := part
		if kind == flight.AllReduce || kind == flight.Broadcast {
			most = all
		}
		if !reduces(kind) {
			list = operation{kind: kind}.sizes(list, k, most)
			continue
		}
		for _, t := range c.Types {
			for _, op := range c.Ops {
				list = operation{kind, t, op}.sizes(list, k, most)
			}
		}
	}
	return list
}

// sizes appends the sizes of an operation: powers of two from 16 bytes on, and the same
// sizes minus one element.
func (o operation) sizes(list []Choice, k *Router, most int) []Choice {
	size := max(o.dtype.Size(), 1)
	for bytes := 16; bytes > 0 && bytes <= most; bytes *= 2 {
		if bytes <= oddBytes {
			list = append(list, o.choice(k, bytes-size))
		}
		list = append(list, o.choice(k, bytes))
	}
	return list
}

// choice returns the possible strategies for an operation of a size.
func (o operation) choice(k *Router, bytes int) Choice {
	c := Choice{Operation: o.kind.Plain(), Bytes: bytes, what: o, Times: []Timing{{Strategy: NCCLOnly}}}
	if reduces(o.kind) {
		c.Type, c.Reduction = o.dtype.String(), o.op.String()
	}
	x := o.collective(bytes)
	for s := NCCLOnly + 1; s < Tuned; s++ {
		// OwnKernels without a choice of algorithm is one of the strategies with one.
		if s == OwnKernels && o.kind == flight.AllReduce || s.Algorithm() && o.kind != flight.AllReduce {
			continue
		}
		if s == CopyEngines && bytes < engineBytes {
			continue
		}
		if k.supports(s, &x, MostBytes) {
			c.Times = append(c.Times, Timing{Strategy: s})
		}
	}
	return c
}

// measuredType returns the element type that an operation is measured with.
func (o operation) measuredType() memory.DType {
	if o.dtype == memory.Invalid {
		return memory.Uint8
	}
	return o.dtype
}

func (o operation) collective(bytes int) ranks.Collective {
	t := o.measuredType()
	return ranks.Collective{Kind: o.kind, DType: t, Op: o.op, Count: bytes / t.Size(), Together: true}
}
