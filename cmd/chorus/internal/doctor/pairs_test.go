package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The checks of benchmarks have the verdict of the benchmark, and are unknown without one.
func TestMeasured(t *testing.T) {
	all := func(s Speed) *Measured { return &Measured{nil, s, s, s, s} }
	for _, c := range []*Check{peerData, pairs, allReduce, pinned} {
		for _, x := range []struct {
			m    *Measured
			want Verdict
			text string
		}{
			{nil, Unknown, "not measured"},
			{all(Speed{Missing: "one GPU"}), Unknown, "one GPU"},
			{all(Speed{OK: true, Reason: "fast"}), Pass, "fast"},
			{all(Speed{Reason: "slow"}), Fail, "slow"},
		} {
			w := healthy()
			w.Measured = x.m
			r := w.runOne(t, c)[0]
			require.Equal(t, x.want, r.Verdict)
			require.Contains(t, r.Found+r.Cause, x.text)
		}
	}
	w := healthy()
	w.Measured = &Measured{Pairs: Speed{OK: true, Reason: "fast"}, AllReduce: Speed{Reason: "slow"}}
	require.Equal(t, Pass, w.runOne(t, pairs)[0].Verdict)
	require.Equal(t, Fail, w.runOne(t, allReduce)[0].Verdict)
}
