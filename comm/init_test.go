package comm_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// initVar makes the test binary a process of a job that calls comm.Init. Its value selects
// the body of TestInitProcess.
const initVar = "COMM_TEST_INIT"

// runInitProcess runs only TestInitProcess, which also checks that nothing stays open.
func runInitProcess(m *testing.M) {
	flag.Parse()
	for name, value := range map[string]string{"test.run": "^TestInitProcess$", "test.v": "true"} {
		if err := flag.Set(name, value); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testgpu.Main(m)
}

// TestInitProcess is the test in each process that the other tests of Init start.
func TestInitProcess(t *testing.T) {
	name, worker := os.LookupEnv(initVar)
	if !worker {
		t.Skip("the tests of Init start this test in other processes")
	}
	initProcesses[name](t)
}

var initProcesses = map[string]func(t *testing.T){
	"world":          initWorld,
	"alone":          initAlone,
	"all devices":    initAllDevices,
	"ended context":  initEndedContext,
	"hanging driver": initHangingDriver,
	"late":           initLate,
	"lost":           initLost,
	"fallback":       initFallback,
	"no fallback":    initFails(`comm: join as rank 0 of 1: open the devices: device: CUDA is not available`, "CHORUS_BACKEND=virtual"),
	"attach":         initFails(`comm: init: attach to the job: cluster: environment: .*WORLD_SIZE`),
	"devices":        initFails(`comm: join as rank 0 of 1: open the devices: .*CHORUS_VIRTUAL_DEVICES="0": want`),
	"all no devices": initFails(`comm: init: open the devices: .*CHORUS_VIRTUAL_DEVICES="0": want`),
	"device":         initNoDevice,
	"one device":     initFails(`ranks 0 .* and 1 .* are both on virtual:0`),
	"join":           initMisfit,
	"local":          initFails(`comm: local: .*ncclCommInitRank`),
	"readme":         func(t *testing.T) { require.NoError(t, program()) },
	"options":        initFails(`comm: init: NCCL.Recoverable is set`),
}

// Every process of a job gets the group, and Shutdown ends the group and the session.
func TestInit(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"virtual", "cuda"} {
		for name, ranks := range map[string]int{"world": 3, "ended context": 2, "late": 2, "hanging driver": 2} {
			if backend == "cuda" && name == "hanging driver" {
				continue // CUDA's driver does not hang on request
			}
			t.Run(backend+"/"+name, func(t *testing.T) {
				if backend == "cuda" {
					ranks = 2
					testgpu.CUDA(t, ranks)
				}
				code, out, _ := job(t, backend, "", ranks, initVar+"="+name)
				require.Zero(t, code, out)
				require.Equal(t, ranks, strings.Count(out, "--- PASS: TestInitProcess"), out)
			})
		}
	}
}

// A process that no launcher has started is a job of one process.
func TestInitAlone(t *testing.T) {
	t.Parallel()
	eachBackend(t, 1, 1, testgpu.CUDA, func(t *testing.T, backend string, _ int) {
		for _, name := range []string{"alone", "all devices"} {
			t.Run(name, func(t *testing.T) {
				initAsProcess(t, name, env.Backend.Name+"="+backend)
			})
		}
	})
	t.Run("fallback", func(t *testing.T) {
		initAsProcess(t, "fallback", env.Backend.Name+"=auto", env.VisibleDevices.Name+"=")
	})
}

// A failure of each step is an error in all processes, and leaves nothing open.
func TestInitFails(t *testing.T) {
	t.Parallel()
	for name, vars := range map[string][]string{
		"attach":         {env.Launcher.Name + "=torchrun", "RANK=0"},
		"devices":        {env.Backend.Name + "=virtual", env.VirtualDevices.Name + "=0"},
		"all no devices": {env.Backend.Name + "=virtual", env.VirtualDevices.Name + "=0"},
		"no fallback":    {env.Backend.Name + "=auto", env.VisibleDevices.Name + "=", env.LibCUDA.Name + "=/nonexistent"},
		"local":          {env.Backend.Name + "=virtual", env.VirtualFaults.Name + "=ncclCommInitRankScalable#1=ncclSystemError"},
		"options":        nil,
	} {
		t.Run(name, func(t *testing.T) { initAsProcess(t, name, vars...) })
	}
	for name, vars := range map[string][]string{
		"device":     {env.VirtualDevices.Name + "=2", env.ShareGPUs.Name + "=no"},
		"one device": {env.VirtualDevices.Name + "=1", env.ShareGPUs.Name + "=no"},
		"join":       nil,
	} {
		t.Run(name, func(t *testing.T) {
			code, out, took := job(t, "virtual", "", 3, append(vars, initVar+"="+name)...)
			require.Zero(t, code, out)
			require.Equal(t, 3, strings.Count(out, "--- PASS: TestInitProcess"), out)
			require.Less(t, took, 2*time.Minute, out)
		})
	}
}

// Close succeeds after the session was lost.
func TestInitLost(t *testing.T) {
	t.Parallel()
	code, out, _ := job(t, "virtual", "", 3, initVar+"=lost")
	require.Equal(t, 128+9, code, out)
	require.Equal(t, 2, strings.Count(out, "closed after the loss"), out)
}

// initAsProcess runs the test binary as a process without a launcher, and returns its output.
func initAsProcess(t *testing.T, name string, vars ...string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(testgpu.Context(t), self)
	cmd.Env = append(append(os.Environ(), env.Launcher.Name+"=none", initVar+"="+name), vars...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "--- PASS: TestInitProcess", string(out))
	return string(out)
}

func initWorld(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), &comm.InitConfig{AllDevices: true})
	require.NoError(t, err)
	require.Equal(t, g.Session().Rank(), g.Rank())
	require.Equal(t, g.Session().Size(), g.Size())
	require.Equal(t, 1, g.Locals())
	require.Equal(t, g.Session().LocalRank(), g.Device(0).Ordinal())
	initReduce(t, g)
	require.NoError(t, g.Shutdown(testgpu.Context(t)))
	requireEnded(t, g, nil)
}

func initAlone(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), nil)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1, 1, 1}, []int{g.Rank(), g.Size(), g.Locals(), g.Session().Size()})
	require.Zero(t, g.Device(0).Ordinal())
	initReduce(t, g)
	require.NoError(t, g.Close())
	requireEnded(t, g, device.ErrClosed)
	require.Nil(t, (*comm.Group)(nil).Session())
}

func initAllDevices(t *testing.T) {
	all, err := device.All()
	require.NoError(t, err)
	g, err := comm.Init(testgpu.Context(t), &comm.InitConfig{AllDevices: true, Group: &comm.Config{NCCL: &nccl.Config{Name: "named"}}})
	require.NoError(t, err)
	require.Equal(t, len(all), g.Locals())
	require.Equal(t, 1, g.Session().Size())
	var trace strings.Builder
	require.NoError(t, g.Communicator(0).DumpTrace(&trace))
	require.Contains(t, trace.String(), "named")
	initReduce(t, g)
	sub, err := g.Split(testgpu.Context(t), make([]int, len(all)), nil)
	require.NoError(t, err)
	require.Nil(t, sub[0].Session(), "the session belongs to the first group")
	require.NoError(t, sub[0].Close())
	require.NoError(t, g.Shutdown(testgpu.Context(t)))
	requireEnded(t, g, nil)
}

func initFallback(t *testing.T) {
	var notes []string
	g, err := comm.Init(testgpu.Context(t), &comm.InitConfig{Fallback: func(note string) { notes = append(notes, note) }})
	require.NoError(t, err)
	require.Equal(t, "virtual", g.Device(0).System().Backend())
	require.Len(t, notes, 1)
	require.Contains(t, notes[0], "running on virtual devices")
	require.NoError(t, g.Close())
	requireEnded(t, g, device.ErrClosed)
}

// A rank whose context has ended leaves an unfinished group at once.
func initEndedContext(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), nil)
	require.NoError(t, err)
	if g.Rank() == 0 {
		streamtest.Hold(t, g.Stream(0))
		ctx, cancel := context.WithCancelCause(testgpu.Context(t))
		cancel(errors.New("out of time"))
		require.ErrorContains(t, g.Shutdown(ctx), "out of time")
	} else {
		requireRank0Left(t, g)
	}
	requireEnded(t, g, device.ErrClosed)
}

// requireRank0Left waits until rank 0 has left the job, and closes the group.
func requireRank0Left(t *testing.T, g *comm.Group) {
	var left *cluster.BarrierError
	require.ErrorAs(t, g.Session().Barrier(testgpu.Context(t), "end"), &left)
	require.Equal(t, []int{0}, left.Left)
	require.NoError(t, g.Close())
}

// A rank whose devices cannot be closed leaves the job all the same, and says why.
func initHangingDriver(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), nil)
	require.NoError(t, err)
	if g.Rank() == 0 {
		comm.SetCloseTimeout(t, 100*time.Millisecond)
		gpu.SystemOf(g.Device(0).System()).Machine.HangNext("cuStreamDestroy")
		require.ErrorContains(t, g.Close(), "the driver or NCCL does not answer")
		require.Error(t, g.Session().Context().Err())
	} else {
		requireRank0Left(t, g)
	}
}

// Shutdown of rank 0 stays in the job until rank 1 leaves it, too: a barrier of rank 1 finds
// that rank 0 is missing, but has not left.
func initLate(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), nil)
	require.NoError(t, err)
	if g.Rank() == 0 {
		require.NoError(t, g.Shutdown(testgpu.Context(t)))
		requireEnded(t, g, nil)
		return
	}
	sess := comm.TakeSession(g)
	require.NoError(t, g.Shutdown(testgpu.Context(t)))
	ctx, cancel := context.WithTimeout(testgpu.Context(t), time.Second/2)
	defer cancel()
	var missing *cluster.BarrierError
	require.ErrorAs(t, sess.Barrier(ctx, "never"), &missing)
	require.Equal(t, []int{0}, missing.Missing)
	require.Empty(t, missing.Left)
	require.NoError(t, sess.Shutdown(testgpu.Context(t)))
}

// Rank 1 is killed, and the other ranks close their groups.
func initLost(t *testing.T) {
	g, err := comm.Init(testgpu.Context(t), nil)
	require.NoError(t, err)
	xs, err := comm.Make[float32](g, 1)
	require.NoError(t, err)
	defer xs.Close()
	require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
	if g.Rank() == 1 {
		require.NoError(t, g.Wait(testgpu.Context(t))) // all ranks have a group
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
	}
	<-g.Session().Context().Done()
	_, lost := errors.AsType[*cluster.MemberLostError](context.Cause(g.Session().Context()))
	require.True(t, lost)
	require.ErrorIs(t, g.Shutdown(testgpu.Context(t)), comm.ErrBroken)
	requireEnded(t, g, device.ErrClosed)
	fmt.Println("closed after the loss")
}

// initFails returns the body of a process whose Init returns an error with these texts.
func initFails(texts ...string) func(t *testing.T) {
	return func(t *testing.T) {
		cfg := &comm.InitConfig{AllDevices: os.Getenv(initVar) == "local" || os.Getenv(initVar) == "all no devices"}
		if os.Getenv(initVar) == "options" {
			cfg.Group = &comm.Config{NCCL: &nccl.Config{Recoverable: true}}
		}
		g, err := comm.Init(testgpu.Context(t), cfg)
		require.Error(t, err)
		for _, text := range texts {
			require.Regexp(t, text, err)
		}
		require.NoError(t, g.Shutdown(testgpu.Context(t)))
		require.NoError(t, g.Close())
	}
}

// The host has fewer devices than processes: all ranks learn which rank has none.
func initNoDevice(t *testing.T) {
	_, err := comm.Init(testgpu.Context(t), &comm.InitConfig{Fallback: func(string) {}})
	require.ErrorContains(t, err, "open device 2: there are 2")
	require.ErrorContains(t, err, "each of the 3 processes on this host needs a device: start at most 2")
	if os.Getenv(env.LocalRank.Name) != "2" {
		require.ErrorContains(t, err, "rank 2 cannot: ")
	}
}

// One rank has other options: all ranks get an error.
func initMisfit(t *testing.T) {
	cfg := &comm.Config{Strategy: comm.NCCLOnly}
	if os.Getenv(env.LocalRank.Name) == "1" {
		cfg.Strategy = comm.OwnKernels
	}
	_, err := comm.Init(testgpu.Context(t), &comm.InitConfig{Group: cfg})
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "set Config.Strategy")
}

// initReduce checks an all-reduce of the ranks.
func initReduce(t *testing.T, g *comm.Group) {
	t.Helper()
	xs, err := comm.Make[int32](g, 3)
	require.NoError(t, err)
	defer func() { require.NoError(t, xs.Close()) }()
	for i, x := range xs {
		require.NoError(t, x.CopyFrom(g.Stream(i), []int32{1, int32(g.Rank() + i), 7}))
	}
	require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
	require.NoError(t, g.Wait(testgpu.Context(t)))
	out := make([]int32, 3)
	require.NoError(t, xs[0].CopyTo(g.Stream(0), out))
	n := int32(g.Size())
	require.Equal(t, []int32{n, n * (n - 1) / 2, 7 * n}, out)
}

// requireEnded checks that the group and its session have ended, that they can be closed
// again, and the error of another Shutdown.
func requireEnded(t *testing.T, g *comm.Group, shutdown error) {
	t.Helper()
	for range 2 {
		require.NoError(t, g.Close())
		require.ErrorIs(t, g.Shutdown(testgpu.Context(t)), shutdown)
	}
	require.ErrorIs(t, g.Err(), device.ErrClosed)
	require.Error(t, g.Session().Context().Err())
	require.Error(t, g.Session().Set(testgpu.Context(t), "key", nil))
}

// A keyed Rendezvous has keys of a secret, like a session of package cluster.
type keyed struct {
	*exchange
	key []byte
	err error
}

func (k *keyed) Key(string) ([]byte, error) { return k.key, k.err }

func TestEncryptedJoin(t *testing.T) {
	t.Setenv("CHORUS_NCCL_ENCRYPT", "yes")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.32.3"})
	joinBy := func(of func(b *exchange) comm.Rendezvous) []error {
		gs, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) { return of(b), nil })
		for _, g := range gs {
			require.NoError(t, g.Close())
		}
		return errs
	}
	for _, err := range joinBy(func(b *exchange) comm.Rendezvous { return b }) {
		require.ErrorContains(t, err, "CHORUS_NCCL_ENCRYPT is yes, but a")
	}
	none := errors.New("the job has no secret")
	for _, err := range joinBy(func(b *exchange) comm.Rendezvous { return &keyed{exchange: b, err: none} }) {
		require.ErrorContains(t, err, none.Error()) // of this rank, or of the other one as text
	}
	require.NoError(t, errors.Join(joinBy(func(b *exchange) comm.Rendezvous { return &keyed{exchange: b, key: make([]byte, 32)} })...))
	require.ErrorContains(t, nccl.SetEncryption(devs[0], nil), "a key of 0 bytes")
	require.ErrorIs(t, nccl.SetEncryption(devs[0], []byte("another key of 32 bytes or more..")), nccl.ErrorInvalidUsage, "the key is set")
}

// Errors of arguments say what is wrong with them, and nothing about the group where it has
// nothing to do with that.
func TestArgumentErrorsSayNoMoreThanIsWrong(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	xs, _ := shards(t, g, 8)
	closed, err := memory.Make[float32](g.Stream(0), 8)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, unknown := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}), &comm.Config{Strategy: "fastest"})
	_, noOne := comm.Local(testgpu.Context(t), []*device.Device{nil, nil}, nil)
	_, none := comm.Local(testgpu.Context(t), []*device.Device{}, nil)
	_, noWork := comm.Start(g, nil)
	for text, err := range map[string]error{
		`comm: there is no strategy "fastest": want one of`: unknown,
		"comm: local: device 0 of 2 is nil":                 noOne,
		"comm: local: no devices given":                     none,
		"comm: start: no function given":                    noWork,
		"use after Close":                                   comm.AllReduce(g, comm.Sum, closed, xs[1]),
	} {
		require.ErrorIs(t, err, comm.ErrMismatch, text)
		require.ErrorContains(t, err, text)
		require.NotContains(t, err.Error(), "do not fit the group")
	}
	require.ErrorIs(t, comm.AllReduce(g, comm.Sum, closed, xs[1]), device.ErrClosed)
}

// A group that this process has ended says so, and why.
func TestErrorsOfAnEndedGroup(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	for how, end := range map[string]func(g *comm.Group) error{
		"closed the group":    (*comm.Group).Close,
		"shut the group down": func(g *comm.Group) error { return g.Shutdown(testgpu.Context(t)) },
		"closed the group (fail)": func(g *comm.Group) error {
			_ = g.Communicator(1).Abort()
			_ = g.Wait(testgpu.Context(t))
			return g.Close()
		},
	} {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		xs, _ := shards(t, g, 8)
		require.NoError(t, end(g), how)
		err = comm.AllReduce(g, comm.Sum, xs...)
		require.ErrorIs(t, err, device.ErrClosed)
		require.NotContains(t, err.Error(), "use after Close")
		if how == "closed the group (fail)" {
			require.ErrorIs(t, err, comm.ErrBroken)
			require.ErrorContains(t, err, "; it was broken before: nccl: rank 1 of 2 (virtual:1): this process aborted the communicator ")
			continue
		}
		require.ErrorContains(t, err, "comm: all-reduce: this process "+how+" ")
		require.ErrorContains(t, g.Err(), "comm: error: this process "+how+" ")
		require.ErrorContains(t, nccl.AllReduce(g.Communicator(0), g.Stream(0), xs[0], xs[0], nccl.Sum), "ncclAllReduce on rank 0 of 2 (virtual:0): this process ")
	}
}

// Local ranks of one color are one group, ordered by their keys, that works while its
// parent does and afterwards.
func TestSplit(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g, err := comm.Local(ctx, devs[:4], nil)
		require.NoError(t, err)
		groups, err := g.Split(ctx, []int{5, 0, 5, comm.NoColor}, []int{1, 0, 0, 0})
		require.NoError(t, err)
		require.Same(t, groups[0], groups[2])
		require.NotSame(t, groups[0], groups[1])
		require.Nil(t, groups[3])
		require.Equal(t, 2, groups[0].Size())
		require.Equal(t, devs[2], groups[0].Device(0), "its key is lower")
		require.Equal(t, devs[0], groups[0].Device(1))
		require.Equal(t, 1, groups[1].Size())
		for _, sub := range groups[:2] {
			require.NoError(t, conform(ctx, sub))
		}
		require.NoError(t, conform(ctx, g))

		sub, err := g.Sub(ctx, 3, 1)
		require.NoError(t, err)
		require.Equal(t, []*device.Device{devs[3], devs[1]}, []*device.Device{sub.Device(0), sub.Device(1)})
		require.NoError(t, g.Shutdown(ctx))
		require.NoError(t, conform(ctx, sub))
		for _, x := range []*comm.Group{groups[0], groups[1], sub} {
			require.NoError(t, x.Shutdown(ctx))
		}
	})
}

func TestBadSplits(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, ctx := local(t, devs), testgpu.Context(t)
		for _, err := range []error{
			second(g.Split(ctx, []int{0}, nil)),
			second(g.Split(ctx, []int{0, 0}, []int{1})),
			second(g.Split(ctx, []int{0, -7}, nil)),
			second(g.Split(ctx, []int{0, math.MaxInt32 + 1}, nil)),
			second(g.Split(ctx, []int{0, 1 << 40}, nil)),
			second(g.Split(ctx, []int{0, 0}, []int{0, math.MaxInt32 + 1})),
			second(g.Split(ctx, []int{0, 0}, []int{0, math.MinInt32 - 1})),
			second(g.Sub(ctx, 0, 2)),
			second(g.Sub(ctx, 1, 1)),
			second(g.Sub(ctx, -1)),
		} {
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
		widest, err := g.Split(ctx, []int{math.MaxInt32, math.MaxInt32}, []int{math.MaxInt32, math.MinInt32})
		require.NoError(t, err)
		require.Equal(t, 1, widest[0].Communicator(0).Device().Ordinal(), "the smaller key is first")
		require.NoError(t, widest[0].Close())
		none, err := g.Split(ctx, []int{comm.NoColor, comm.NoColor}, nil)
		require.NoError(t, err)
		require.Equal(t, []*comm.Group{nil, nil}, none)
		require.NoError(t, g.Barrier(ctx))
	})
}

// Ranks that want different sub-groups are all told so, and go on.
func TestSubOfListsThatDiffer(t *testing.T) {
	for _, other := range [][]int{{1, 0}, {0, 99}} {
		subOfLists(t, [][]int{{0, 1}, other, {0, 1}})
	}
}

func subOfLists(t *testing.T, lists [][]int) {
	devs, errs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), make([]error, 3)
	ends := joinDevices(t, cut(devs, 1, 1, 1), nil, func(ctx context.Context, g *comm.Group) error {
		_, errs[g.Rank()] = g.Sub(ctx, lists[g.Rank()]...)
		return g.Barrier(ctx)
	})
	require.NoError(t, errors.Join(ends...))
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, fmt.Sprintf("comm: sub-group: rank 0 has a call of Sub with the ranks %v and rank 1 a call of Sub with the ranks %v", lists[0], lists[1]))
	}
}

// TestClosesOfRanksThatDiffer has all ranks close their groups as soon as they know that their arguments
// differ.
func TestClosesOfRanksThatDiffer(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	for range 20 {
		errs := joinDevices(t, cut(devs, 1, 1, 1), nil, func(ctx context.Context, g *comm.Group) error { return second(g.Sub(ctx, g.Rank())) })
		for i, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", i)
		}
	}
}

// conformSplit splits a group over processes into the even and the odd ranks, and takes
// the last and the first one out.
func conformSplit(ctx context.Context, g *comm.Group) error {
	ranks := localRanks(g)
	colors, keys := make([]int, len(ranks)), make([]int, len(ranks))
	for i, rank := range ranks {
		colors[i], keys[i] = rank%2, -rank
	}
	groups, err := g.Split(ctx, colors, keys)
	if err != nil {
		return err
	}
	var ended []*comm.Group
	for color := range 2 { // in the same order everywhere
		i := slices.Index(colors, color)
		if i < 0 {
			continue
		}
		child := groups[i]
		if want := (g.Size() + 1 - color) / 2; child.Size() != want {
			return fmt.Errorf("split: rank %d is in a group of %d, want %d", ranks[i], child.Size(), want)
		}
		for j, rank := range ranks {
			if want := slices.Index(localRanks(child), (g.Size()-1-rank)/2); (groups[j] == child) != (colors[j] == color) || want < 0 && groups[j] == child {
				return fmt.Errorf("split: rank %d of color %d: the group of color %d has the local ranks %v", rank, colors[j], color, localRanks(child))
			}
		}
		if err := conform(ctx, child); err != nil {
			return fmt.Errorf("split: %w", err)
		}
		ended = append(ended, child)
	}
	last := g.Size() - 1
	sub, err := g.Sub(ctx, last, 0)
	if err != nil {
		return err
	}
	var want []int
	for rank, is := range []int{last, 0} {
		if slices.Contains(ranks, is) {
			want = append(want, rank)
		}
	}
	if (sub == nil) != (want == nil) {
		return fmt.Errorf("sub-group: the ranks %v got %v", ranks, sub)
	}
	if sub != nil {
		if !slices.Equal(want, localRanks(sub)) {
			return fmt.Errorf("sub-group: the ranks %v are %v in it, want %v", ranks, localRanks(sub), want)
		}
		if err := errors.Join(conform(ctx, sub), sub.Shutdown(ctx)); err != nil {
			return fmt.Errorf("sub-group: %w", err)
		}
	}
	for _, child := range ended {
		if err := child.Shutdown(ctx); err != nil {
			return err
		}
	}
	return g.Barrier(ctx)
}
