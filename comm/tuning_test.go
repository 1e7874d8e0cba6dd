package comm_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

// siteOf is where tunings for groups of these devices hold.
func siteOf(t *testing.T, devs []*device.Device) comm.Site {
	t.Helper()
	g := local(t, devs)
	at, err := g.Site()
	require.NoError(t, err)
	return at
}

// anyTuning has each strategy as the fastest of some operations and sizes.
func anyTuning(at comm.Site, r *rand.Rand) *comm.Tuning {
	t := &comm.Tuning{For: at}
	every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines}
	for _, op := range []string{"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"} {
		for bytes := 4; bytes <= 1<<16; bytes += 1 + bytes/2 {
			c := comm.Choice{Operation: op, Bytes: bytes}
			if strings.Contains(op, "reduce") {
				c.Type, c.Reduction = "float32", "sum"
			}
			for i, k := range r.Perm(len(every)) {
				x := comm.Timing{Strategy: every[k], Micros: float64(i)}
				if x.Strategy == comm.CopyEngines {
					x.Eager = float64(r.IntN(8))
				}
				c.Times = append(c.Times, x)
			}
			t.Choices = append(t.Choices, c)
		}
	}
	return t
}
