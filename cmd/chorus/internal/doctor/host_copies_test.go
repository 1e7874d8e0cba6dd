package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHostCopies(t *testing.T) {
	good := Copy{Product: "NVIDIA H200", ToGPU: 55, FromGPU: 55}
	for _, x := range []struct {
		name string
		last Copy
		want Verdict
		text string
	}{
		{"healthy", good, Pass, "55.0 GB/s to the GPU"},
		{"slow one way", Copy{Product: "NVIDIA H200", ToGPU: 55, FromGPU: 30}, Fail, "30.0 GB/s from it"},
		{"slower than the others", Copy{Product: "NVIDIA L4", ToGPU: 20, FromGPU: 20}, Fail, "44 GB/s"},
		{"not measured", Copy{Missing: "no memory"}, Unknown, "no memory"},
		{"virtual", Copy{OnlyMemory: true, ToGPU: 1, FromGPU: 1}, Unknown, "virtual devices"},
	} {
		w := healthy()
		w.Measured = &Measured{Copies: []Copy{good, good, x.last}}
		r := w.runOne(t, hostCopies)
		require.Len(t, r, 3)
		require.Equal(t, Pass, r[0].Verdict, x.name)
		require.Equal(t, x.want, r[2].Verdict, x.name)
		require.Contains(t, r[2].Found+r[2].Want+r[2].Cause, x.text, x.name)
	}
	w := healthy()
	w.Measured = &Measured{Copies: []Copy{{Product: "NVIDIA L4", ToGPU: 12, FromGPU: 12}}}
	require.Equal(t, Unknown, w.runOne(t, hostCopies)[0].Verdict, "one GPU without a reference")
	w.Measured.Copies[0].Product = "NVIDIA H100 80GB HBM3"
	require.Equal(t, Fail, w.runOne(t, hostCopies)[0].Verdict)
	w.Measured = nil
	require.Equal(t, Unknown, w.runOne(t, hostCopies)[0].Verdict)
}
