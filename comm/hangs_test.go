package comm_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A hangCase is what two ranks do, each in its own goroutine, so that they wait forever.
type hangCase struct {
	kind    string
	issue   func(t *testing.T, g *comm.Group, xs []memory.Slice[float32]) error
	texts   []string // in the verdict
	queued  []int    // the ranks whose last collective their stream has not reached
	culprit []int    // nil means that the verdict names no rank
	virtual string   // why the case cannot run on CUDA
}

// hangElements is the number of elements of an operation, N in the texts. NCCL's buffers take all data of a small send, which then
// completes without its receive.
func hangElements(devs []*device.Device) int {
	if devs[0].System().Backend() == "cuda" {
		return 1 << 26
	}
	return 1 << 20
}

var hangCases = map[string]hangCase{
	"send, then receive": {
		kind: analyze.KindOrder,
		issue: func(_ *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			return errors.Join(comm.Send(g, 1-g.Rank(), xs[0]), comm.Recv(g, 1-g.Rank(), xs[1]))
		},
		texts: []string{
			"Ranks wait for each other in a cycle", "in send(N x Float) to rank 1", "whose matching operation is queued behind its send(N x Float) to rank 0",
			"put those of a rank into one Batch (comm.SendRecv does)",
		},
		culprit: []int{0, 1},
	},
	"long kernel": {
		kind: analyze.KindQueued,
		issue: func(t *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			if g.Rank() == 1 {
				streamtest.Hold(t, g.Stream(0))
			}
			return comm.AllReduce(g, comm.Sum, xs[0])
		},
		texts: []string{
			"All ranks have issued collective 2 (all_reduce(N x Float, sum))", "but the stream of rank 1 (", "has not reached it",
			"ork that was enqueued on the stream before it still runs or waits",
		},
		queued: []int{1}, culprit: []int{1},
	},
	"stream that waits for a long kernel": {
		kind: analyze.KindQueued,
		issue: func(t *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			if g.Rank() == 1 {
				other, err := stream.New(g.Device(0), nil)
				if err != nil {
					return err
				}
				streamtest.Hold(t, other)
				if err := errors.Join(g.Stream(0).WaitStream(other), other.Close()); err != nil {
					return err
				}
			}
			return comm.AllReduce(g, comm.Sum, xs[0])
		},
		texts: []string{"but the stream of rank 1 (", "has not reached it"}, queued: []int{1}, culprit: []int{1},
	},
	"receive behind a long kernel": {
		kind: analyze.KindQueued,
		issue: func(t *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			if g.Rank() == 0 {
				return comm.Send(g, 1, xs[0])
			}
			streamtest.Hold(t, g.Stream(0))
			return comm.Recv(g, 0, xs[1])
		},
		texts: []string{"but the stream of rank 1 (", "has not reached recv(N x Float) from rank 0"}, culprit: []int{1},
	},
	"rank that does not take part": {
		kind: analyze.KindBehind,
		issue: func(_ *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			if g.Rank() == 1 {
				return nil
			}
			return comm.AllReduce(g, comm.Sum, xs[0])
		},
		texts: []string{"Rank 1 (", "has not issued collective 2"}, culprit: []int{1},
	},
	"graph that a rank launches once less": {
		kind: analyze.KindBehind,
		issue: func(t *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			const captured = 3 // in one graph on rank 0, and in a graph each on rank 1
			var list []*graph.Exec
			for range 1 + g.Rank()*(captured-1) {
				x, err := graph.Capture(g.Streams(), func() (err error) {
					for i := g.Rank() * (captured - 1); i < captured && err == nil; i++ {
						err = comm.AllReduce(g, comm.Sum, xs[0])
					}
					return err
				}, nil)
				if err != nil {
					return err
				}
				list = append(list, x)
			}
			t.Cleanup(func() {
				for _, x := range list {
					require.NoError(t, x.Close())
				}
			})
			for launch := range 4 {
				for _, x := range list {
					if launch == 3 && g.Rank() == 1 {
						break
					}
					if err := x.Launch(g.Stream(0)); err != nil {
						return err
					}
				}
			}
			return nil
		},
		texts: []string{"has launched 12 collectives of", "in graphs, and the launches are not known to have ended. But rank 1 (", ") has launched 9: check that all ranks launch"}, culprit: []int{1},
	},
}

// TestDiagnosisOfHangs checks that the error of a timeout, the table of chorus analyze and its JSON say what the
// ranks wait for, and never blame more than is known.
func TestDiagnosisOfHangs(t *testing.T) {
	for name, h := range hangCases {
		t.Run(name, func(t *testing.T) {
			streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) { h.check(t, devs, true) })
		})
	}
}

// firstHangCases are the cases of ranks that are not connected: the first transfer waits in the call of NCCL.
var firstHangCases = map[string]hangCase{
	"send, then receive": {
		kind: analyze.KindOrder, issue: hangCases["send, then receive"].issue, culprit: []int{0, 1},
		texts:   []string{"Ranks wait for each other in a cycle", "in send(N x Float) to rank 1", ", which has not returned from NCCL", "put those of a rank into one Batch (comm.SendRecv does)"},
		virtual: "NCCL takes what each rank says about its send for the other end's receive, and the kernels use wrong addresses",
	},
	"rank that does not take part": {
		kind: analyze.KindBehind, issue: hangCases["rank that does not take part"].issue, culprit: []int{1},
		texts: []string{"Rank 1 (", "has not issued collective 1"},
	},
	"receive that is missing": {
		kind: analyze.KindTransfer, culprit: []int{1},
		issue: func(_ *testing.T, g *comm.Group, xs []memory.Slice[float32]) error {
			if g.Rank() == 1 {
				return nil
			}
			return comm.Send(g, 1, xs[0])
		},
		texts: []string{"waits in send(N x Float) to rank 1, which has not returned from NCCL", "has not issued the matching receive"},
	},
}

// TestDiagnosisOfFirstOperations is TestDiagnosisOfHangs for operations that connect the ranks, which wait in NCCL.
func TestDiagnosisOfFirstOperations(t *testing.T) {
	for name, h := range firstHangCases {
		t.Run(name, func(t *testing.T) {
			streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) { h.check(t, devs, false) })
		})
	}
}

func (h *hangCase) check(t *testing.T, devs []*device.Device, connected bool) {
	if h.virtual != "" && devs[0].System().Backend() == "cuda" {
		t.Skip(h.virtual)
	}
	ctx := testgpu.Context(t)
	gs := joinLimited(t, devs, time.Minute)
	n := hangElements(devs)
	errs, waits, bufs := make([]error, len(gs)), make([]error, len(gs)), make([][]memory.Slice[float32], len(gs))
	both := func(call func(i int, g *comm.Group)) {
		atOnce(len(gs), func(i int) error { call(i, gs[i]); return nil })
	}
	t.Cleanup(func() {
		both(func(i int, g *comm.Group) {
			_ = g.Close()
			for _, x := range bufs[i] {
				require.NoError(t, x.Close())
			}
		})
	})
	both(func(i int, g *comm.Group) { // connects the ranks
		for range 2 {
			x, err := memory.Make[float32](g.Stream(0), n)
			bufs[i], errs[i] = append(bufs[i], x), errors.Join(errs[i], err, x.Zero(g.Stream(0)))
		}
		if errs[i] = errors.Join(errs[i], g.SetTimeout(2*time.Second)); !connected {
			return
		}
		errs[i] = errors.Join(errs[i], g.SetTimeout(time.Minute), comm.AllReduce(g, comm.Sum, bufs[i][0]), comm.SendRecv(g, 1-i, bufs[i][0], 1-i, bufs[i][1]), g.Wait(ctx))
		errs[i] = errors.Join(errs[i], g.SetTimeout(2*time.Second))
	})
	require.NoError(t, errors.Join(errs...))
	time.Sleep(10 * time.Millisecond) // in virtual time: only an operation that comes some time after the last one has a mark, which shows what hangs
	both(func(i int, g *comm.Group) {
		waits[i] = errors.Join(h.issue(t, g, bufs[i]), g.Wait(ctx))
	})
	dir, verdicts := t.TempDir(), ""
	for i, g := range gs {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint("trace-", i)))
		require.NoError(t, err)
		require.NoError(t, g.Communicator(0).DumpTrace(f))
		require.NoError(t, f.Close())
		if waits[i] != nil {
			verdicts += waits[i].Error() + "\n"
		}
		for _, o := range g.Communicator(0).Trace() {
			if o.Collective == 2 && o.Name == "ncclAllReduce" && !o.Captured {
				queued := slices.Contains(h.queued, i)
				require.Equal(t, queued, o.Queued, "rank %d: %+v", i, o)
				require.Equal(t, queued, o.Started.IsZero(), "rank %d: %+v", i, o)
			}
		}
	}
	job, err := analyze.Load([]string{dir}, nil)
	require.NoError(t, err)
	r := job.Analyze()
	require.Equal(t, h.kind, r.Kind, "%s\n%s", r.Verdict, verdicts)
	var culprits []int
	for _, c := range r.Culprits {
		culprits = append(culprits, *c.World)
	}
	require.ElementsMatch(t, h.culprit, culprits, r.Verdict)
	text, err := json.Marshal(r)
	require.NoError(t, err)
	for _, blames := range []string{"not the cause", "hardware", "GPUs and the link"} {
		require.NotContains(t, string(text), blames)
		require.NotContains(t, verdicts, blames)
	}
	for _, want := range h.texts {
		want = strings.ReplaceAll(want, "N x Float", fmt.Sprint(n, " x Float"))
		require.Contains(t, r.Verdict, want)
		require.Contains(t, verdicts, want)
	}
}
