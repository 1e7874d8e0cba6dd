package health

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNCCLDefects(t *testing.T) {
	version := func(v string) func(w *world) {
		return func(w *world) {
			w.nccl = func() (*library, error) { return &library{Path: "/usr/lib/libnccl.so.2", Version: v}, nil }
		}
	}
	w := healthy()
	version("2.32.6")(w)
	require.Equal(t, Pass, w.runOne(t, ncclDefects)[0].Verdict)
	for _, x := range []change{
		noGPU,
		{"stale data in graphs", version("2.28.3"), Warn, "symmetric-in-graphs: symmetric kernels may read data"},
		{"the cure of all", version("2.28.3"), Warn, "install NCCL 2.31.2 or newer"},
		{"without the first", version("2.30.7"), Warn, "windows-in-one-allocation: "},
		{"no NCCL", func(w *world) { w.nccl = func() (*library, error) { return nil, errors.New("no usable library") } }, Unknown, "no usable library"},
		{"no version", version("x"), Unknown, `NCCL's version is "x"`},
	} {
		w := healthy()
		x.make(w)
		r := w.runOne(t, ncclDefects)[0]
		require.Equal(t, x.want, r.Verdict, "%s: %+v", x.name, r)
		require.Contains(t, r.Found+" "+r.Want+" "+r.Cause+" "+r.Cure, x.text, x.name)
	}
}
