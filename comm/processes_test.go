package comm_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// The test binary is a worker of a job when this says what it does: what happens to
// rank 1 in the middle, or "conform".
const faultVar = "COMM_TEST_FAULT"

// launcherVar makes the test binary a launcher, whose configuration it has.
const launcherVar = "COMM_TEST_LAUNCHER"

// paceVar is how long a worker waits before each step.
const paceVar = "COMM_TEST_PACE"

// timeoutVar is the timeout of the operations that wait for rank 1, which has failed. A busy machine may
// need longer for the operations before.
const timeoutVar = "COMM_TEST_TIMEOUT"

func TestMain(m *testing.M) {
	if cfg, ok := os.LookupEnv(launcherVar); ok {
		os.Exit(launcherMain(cfg))
	}
	if _, ok := os.LookupEnv(initVar); ok {
		runInitProcess(m)
	}
	if fault, worker := os.LookupEnv(faultVar); worker {
		if err := work(fault); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		return
	}
	testgpu.Main(m)
}

// devicesVar has the numbers of devices of the processes, such as "1,3"; one device each without it.
const devicesVar = "COMM_TEST_DEVICES"

// openDevices opens the devices of process rank by devicesVar.
func openDevices(rank int) ([]*device.Device, error) {
	sys, err := device.Default()
	if err != nil {
		return nil, err
	}
	first := 0
	for i, text := range strings.Split(os.Getenv(devicesVar), ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, err
		}
		if i == rank {
			return sys.Devices()[first : first+n], nil
		}
		first += n
	}
	return nil, fmt.Errorf("no devices for process %d", rank)
}

// openLocal opens the device of a local rank.
func openLocal(local, n int) (*device.Device, error) {
	sys, err := device.Default()
	if err != nil {
		return nil, err
	}
	return route.OpenLocal(sys, local, n)
}

// work reduces 4 MiB in a loop; rank 1 fails in the middle.
func work(fault string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	if fault == "order" {
		return orderWorker(ctx, sess)
	}
	local := sess.LocalRank()
	if fault == "one device" {
		local = 0
	}
	if fault == "refused" && local == 1 {
		if err := os.Setenv(env.VirtualFaults.Name, "ncclAllReduce#11=ncclSystemError"); err != nil {
			return err
		}
	}
	if faults, ok := strings.CutPrefix(fault, "windows: "); ok && local == 1 {
		if err := os.Setenv(env.VirtualFaults.Name, faults); err != nil {
			return err
		}
	}
	var devs []*device.Device
	if os.Getenv(devicesVar) != "" {
		devs, err = openDevices(sess.Rank())
	} else {
		devs = make([]*device.Device, 1)
		devs[0], err = openLocal(local, sess.LocalSize())
	}
	if err != nil {
		return err
	}
	g, err := comm.JoinDevices(ctx, sess, devs, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	if strings.HasPrefix(fault, "windows: ") {
		return errors.New("rank 1 has a window")
	}
	if fault == "conform" {
		if err := conform(ctx, g); err != nil {
			return err
		}
		if err := conformSplit(ctx, g); err != nil {
			return err
		}
		if err := conformBarrier(ctx, g, sess); err != nil {
			return err
		}
		return errors.Join(g.Shutdown(ctx), sess.Shutdown(ctx))
	}
	if fault == "sub" {
		return absentInSub(ctx, g)
	}
	xs, err := comm.Make[float32](g, 1<<20)
	if err != nil {
		return err
	}
	defer xs.Close()
	for i, x := range xs {
		if err := x.Zero(g.Stream(i)); err != nil {
			return err
		}
	}
	if fault == "nan" {
		return nanOfRank1(ctx, sess, g, xs)
	}
	pace, _ := time.ParseDuration(os.Getenv(paceVar))
	for step := range 20 {
		if pace > 0 {
			time.Sleep(pace) // the others hear of an operation only after a while
		}
		if step == 10 {
			if err := setTimeoutOf(g); err != nil {
				return err
			}
		}
		if step == 10 && sess.Rank() == 1 {
			if fault == "close" {
				_ = g.Close()
				<-sess.Context().Done()
			}
			if fault == "error" {
				return errors.New("rank 1 fails")
			}
			how, flooded := strings.CutPrefix(fault, "flood ")
			if flooded {
				if _, err := sess.Get(ctx, "flooded"); err != nil {
					return err
				}
			}
			if waitsForOthers(fault) {
				for rank := range sess.Size() {
					if rank == 1 {
						continue
					}
					if _, err := sess.Get(ctx, fmt.Sprint("issued/", rank)); err != nil {
						return err
					}
				}
			}
			fail(how)
		}
		issue := func() error { return comm.AllReduce(g, comm.Sum, xs...) }
		if how, ok := strings.CutPrefix(fault, "quantized "); ok && step == 10 {
			if err := quantizedWorker(ctx, g, xs, how); err != nil {
				return err
			}
			return sess.Shutdown(ctx)
		}
		if step == 10 && strings.HasPrefix(fault, "flood ") {
			return flood(ctx, sess, g, issue)
		}
		if fault == "other" && step == 10 && g.Rank() == 1 {
			issue = func() error { return comm.BroadcastFrom(g, 0, xs...) }
		}
		if fault == "fewer" && step == 10 && g.Rank() == 1 {
			issue = func() error { return comm.AllReduce(g, comm.Sum, xs[0].Slice(0, 1<<20-1)) }
		}
		if fault == "way" && step == 10 && g.Rank() == 1 {
			return onAnotherStream(ctx, g, xs[0])
		}
		if err := issue(); err != nil {
			return err
		}
		if step == 10 && sess.Rank() != 1 && waitsForOthers(fault) {
			if err := sess.Set(ctx, fmt.Sprint("issued/", sess.Rank()), nil); err != nil {
				return err
			}
		}
		if err := g.Wait(ctx); err != nil {
			return err
		}
	}
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	return sess.Shutdown(ctx)
}

// waitsForOthers reports whether rank 1 fails only when the other ranks have issued their operation. Otherwise they would be behind, too,
// when the first of them gives up, and two ranks that differ have no majority.
func waitsForOthers(fault string) bool {
	return slices.Contains([]string{"absent", "stop", "other", "fewer"}, fault)
}

// setTimeoutOf sets the timeout of a group to timeoutVar, if it is set.
func setTimeoutOf(g *comm.Group) error {
	d, err := time.ParseDuration(os.Getenv(timeoutVar))
	if err != nil {
		return nil
	}
	return g.SetTimeout(d)
}

// flood issues more than a stream takes, so that the calls wait in the driver for rank 1.
func flood(ctx context.Context, sess *cluster.Session, g *comm.Group, issue func() error) error {
	for n := 0; ; n++ {
		if n == 900 && g.Rank() == 0 { // and soon more
			if err := sess.Set(ctx, "flooded", nil); err != nil {
				return err
			}
		}
		if issue() != nil {
			return g.Err()
		}
	}
}

// onAnotherStream issues an all-reduce on a stream that is not the group's, which is NCCL's.
func onAnotherStream(ctx context.Context, g *comm.Group, x memory.Slice[float32]) error {
	s, err := stream.New(g.Device(0), nil)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.WaitStream(g.Stream(0)); err != nil {
		return err
	}
	if err := nccl.AllReduce(g.Communicator(0), s, x, x, nccl.Sum); err != nil {
		return err
	}
	return g.Communicator(0).Wait(ctx, s)
}

// absentInSub lets rank 1, which is rank 0 of a group of ranks 1 and 2, issue nothing.
func absentInSub(ctx context.Context, g *comm.Group) error {
	sub, err := g.Sub(ctx, 1, 2)
	if err != nil {
		return err
	}
	if g.Rank() != 2 {
		select {}
	}
	xs, err := comm.Make[float32](sub, 8)
	if err != nil {
		return err
	}
	defer xs.Close()
	if err := errors.Join(setTimeoutOf(sub), comm.AllReduce(sub, comm.Sum, xs...)); err != nil {
		return err
	}
	return sub.Wait(ctx)
}

// conformBarrier lets one rank after the other come late to a barrier: nobody goes on
// before it has been there.
func conformBarrier(ctx context.Context, g *comm.Group, sess *cluster.Session) error {
	for round := range 4 * g.Size() {
		key := fmt.Sprint("came/", round)
		if g.Rank() == round%g.Size() {
			for range 20 { // something to do before
				if _, err := sess.Add(ctx, "late", 1); err != nil {
					return err
				}
			}
		}
		if _, err := sess.Add(ctx, key, 1); err != nil {
			return err
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		came, err := sess.Add(ctx, key, 0)
		if err != nil {
			return err
		}
		if came != int64(sess.Size()) {
			return fmt.Errorf("barrier %d let rank %d go when %d of %d processes had come", round, g.Rank(), came, sess.Size())
		}
	}
	return nil
}

func fail(fault string) {
	switch fault {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "exit":
		os.Exit(3)
	case "panic":
		panic("out of luck")
	case "stop":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "absent":
		select {}
	}
}

// A worker that ends in the middle of an all-reduce ends the job in seconds; the
// launcher says which one was first and why, and exits with its code.
func TestWorkerFailsInAllReduce(t *testing.T) {
	t.Parallel()
	eachBackend(t, 3, 2, testgpu.Ranks, func(t *testing.T, backend string, ranks int) {
		for _, c := range []struct {
			fault string
			code  int
			says  []string
		}{
			{"", 0, nil},
			{"kill", 128 + 9, []string{"chorus: rank 1 ", "SIGKILL"}},
			{"exit", 3, []string{"chorus: rank 1 ", "exited with code 3"}},
			{"panic", 2, []string{"chorus: rank 1 ", "out of luck"}},
			{"one device", 1, []string{"ranks 0 (pid", "a GPU holds one rank"}},
		} {
			t.Run(c.fault, func(t *testing.T) {
				var vars []string
				if c.fault == "one device" {
					vars = append(vars, env.ShareGPUs.Name+"=no")
				}
				code, out, took := job(t, backend, c.fault, ranks, vars...)
				require.Equal(t, c.code, code, out)
				for _, s := range c.says {
					require.Contains(t, out, s)
				}
				require.Less(t, took, time.Minute, "the launcher had to end a worker: %s", out)
			})
		}
	})
}

// Several processes share one device, which CHORUS_SHARE_GPUS permits.
func TestProcessesShareADevice(t *testing.T) {
	t.Parallel()
	eachBackend(t, 4, 1, testgpu.CUDA, func(t *testing.T, backend string, _ int) {
		gpu, _, _ := strings.Cut(os.Getenv("CUDA_VISIBLE_DEVICES"), ",")
		if gpu == "" {
			gpu = "0"
		}
		one := "CUDA_VISIBLE_DEVICES=" + gpu // otherwise each process has a GPU for itself on a large host
		code, out, _ := job(t, backend, "one device", 4, env.ShareGPUs.Name+"=yes", one)
		require.Zero(t, code, out)
		require.Regexp(t, `ranks 0 \(pid \d+\) and 1 \(pid \d+\) share a GPU: the results are right, but timings mean nothing`, out)
		code, out, _ = job(t, backend, "conform", 3, env.ShareGPUs.Name+"=yes", env.VirtualDevices.Name+"=1", env.CommStrategy.Name+"=own", one)
		require.Zero(t, code, out)
		require.Contains(t, out, "share a GPU")
	})
}

// A worker that is alive but never comes, is stopped or killed: each of the others
// says which one, with its last operation, before the deadline and a little time.
func TestCulpritsAreNamed(t *testing.T) {
	t.Parallel()
	eachBackend(t, 3, 2, testgpu.CUDA, func(t *testing.T, backend string, ranks int) {
		for fault, says := range map[string]string{ // rank 2 may follow in the list, if its report is late
			"absent":     `rank 1 is behind: its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective 10, [^ ]* ago \(as of [^ ]* ago\)[:;] .*nccl: .* as collective 11`,
			"stop":       `rank 1 (is behind|was lost): its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective \d+, [^ ]* ago \(as of [^ ]* ago\)[:;] `,
			"other":      `the ranks do not issue the same operations: .*ncclBroadcast|the ranks do not issue the same operations: .*broadcast`,
			"close":      `rank 1 (has left|is behind): its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective 10, [^ ]* ago \(as of [^ ]* ago\); by then it had closed the group[:;] `,
			"flood stop": `rank 1 (is behind|was lost): its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective \d+, [^ ]* ago \(as of [^ ]* ago\)[:;] `,
			"flood kill": `rank 1 was lost: its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective \d+, [^ ]* ago \(as of [^ ]* ago\): cluster: rank 1`,
			"kill":       `rank 1 was lost: its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective \d+, [^ ]* ago \(as of [^ ]* ago\): cluster: rank 1 .* SIGKILL`,
		} {
			if backend == "cuda" && fault == "other" {
				continue // NCCL may hang or mix data up
			}
			t.Run(fault, func(t *testing.T) {
				if backend == "virtual" {
					t.Parallel() // they mostly wait for deadlines
				}
				limit := "4s"
				switch fault {
				case "other":
					limit = "1m" // the ranks compare their operations long before
				case "kill", "flood kill":
					limit = "1m" // the launcher reports the end long before, but a flood may take seconds
				}
				_, out, took := job(t, backend, fault, ranks, timeoutVar+"="+limit, paceVar+"=60ms")
				require.Regexp(t, `(?m)^\[rank \d\] worker: .*(`+says+`)`, out)
				for rank := range ranks {
					if rank != 1 { // a process that stops for seconds misses the reports of the others
						require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] worker: .*(%s|the flight recorders of the ranks say: (Rank 1|No answer came from rank 1)\b)`, rank, says), out)
					}
				}
				if strings.HasPrefix(fault, "flood") { // their numbers differ, but they all wait for rank 1
					require.NotRegexp(t, `rank [02] is behind|wait in collective \d{3}`, out)
				}
				require.Less(t, took, 2*time.Minute, out)
			})
		}
	})
}

// Where a process has by NCCL what the others have by own kernels, they are told so long before the deadline: who has it
// otherwise, and how.
func TestProcessesWithTwoWays(t *testing.T) {
	t.Parallel()
	eachBackend(t, 2, 2, testgpu.CUDA, func(t *testing.T, backend string, _ int) {
		_, out, took := job(t, backend, "way", 2, env.CommStrategy.Name+"=own", paceVar+"=10ms")
		// The first operation of NCCL ends with an error when the other rank has given up, which only names that rank, or nothing.
		const says = `(?m)^\[rank %d\] worker: .*rank %d runs collective 11 with %s and this rank with %s, .*: ` +
			`its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective 11, .* ago .*the ranks do not issue the same operations as collective 11: rank %[1]d of 2 issued `
		const aborted = `(?m)^\[rank %d\] worker: .*rank %d aborted|^\[rank %[1]d\] worker: nccl: ncclAllReduce on rank %[1]d of 2 .*: ncclInternalError`
		first, second := fmt.Sprintf(says, 0, 1, "NCCL", "Chorus kernels"), fmt.Sprintf(says, 1, 0, "Chorus kernels", "NCCL")
		require.Regexp(t, first+"|"+second, out)
		require.Regexp(t, first+"|"+fmt.Sprintf(aborted, 0, 1), out)
		require.Regexp(t, second+"|"+fmt.Sprintf(aborted, 1, 0), out)
		require.Less(t, took, 2*time.Minute, out)
	})
}

// Processes with several ranks each have all operations, by NCCL and by Chorus kernels.
func TestProcessesWithSeveralDevices(t *testing.T) {
	t.Parallel()
	eachBackend(t, 4, 4, testgpu.CUDA, func(t *testing.T, backend string, _ int) {
		for counts, strategy := range map[string]string{"2,2": "nccl", "1,3": "own"} {
			t.Run(counts, func(t *testing.T) {
				code, out, _ := job(t, backend, "conform", 2, devicesVar+"="+counts, env.VirtualDevices.Name+"=4", env.CommStrategy.Name+"="+strategy)
				require.Zero(t, code, out)
			})
		}
	})
}

// The ranks of a process that fails are named with their process.
func TestCulpritsOfAProcessWithSeveralDevices(t *testing.T) {
	t.Parallel()
	eachBackend(t, 4, 4, testgpu.CUDA, func(t *testing.T, backend string, _ int) {
		for fault, says := range map[string]string{
			"absent": `rank 2 \(in process 1\) is behind: its last reported operation is ncclAllReduce\(1048576 x float32, sum\) as collective 10, .*; rank 3 \(in process 1\) is behind: .* as collective 10.*nccl: .* as collective 11`,
			"kill":   `rank 2 \(in process 1\) was lost: .*; rank 3 \(in process 1\) was lost: .*: cluster: rank 1 .* SIGKILL`,
			"close":  `rank [23] \(in process 1\) (has left|is behind): .* as collective 10, .*; by then it had closed the group`,
		} {
			t.Run(fault, func(t *testing.T) {
				if backend == "virtual" {
					t.Parallel() // they mostly wait for deadlines
				}
				_, out, took := job(t, backend, fault, 2, devicesVar+"=2,2", env.VirtualDevices.Name+"=4", timeoutVar+"=4s", paceVar+"=60ms")
				require.Regexp(t, `(?m)^\[rank 0\] worker: .*(`+says+`)`, out)
				require.NotRegexp(t, `rank [01] (\(in process 0\) )?is behind`, out)
				require.Less(t, took, 2*time.Minute, out)
			})
		}
	})
}

// In a group that was split a rank is named by its number there and in the world, and
// its trace has a file of its own.
func TestCulpritOfASplitGroup(t *testing.T) {
	t.Parallel()
	prefix := filepath.Join(t.TempDir(), "trace-")
	says := regexp.MustCompile(`(?m)^\[rank 2\] worker: .*rank 0 \(rank 1 of the world\) is behind: .* on rank 1 of 2`)
	var out string
	for range 3 { // a process that stops for seconds misses the reports of the others
		if _, out, _ = job(t, "virtual", "sub", 3, timeoutVar+"=4s", "CHORUS_NCCL_TRACE_FILE="+prefix); says.MatchString(out) {
			break
		}
	}
	require.Regexp(t, says, out)
	text, err := os.ReadFile(prefix + "1-split1.0")
	require.NoError(t, err)
	require.Contains(t, string(text), `"split1.0"`)
}

// A process that cannot have the memory of its window, or register it, is named by all,
// and none waits for it until its context ends.
func TestWindowsThatOneProcessCannotHave(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"ncclMemAlloc", "ncclCommWindowRegister"} {
		code, out, took := job(t, "virtual", "windows: "+call+"#1=ncclSystemError", 3, env.CommStrategy.Name+"=windows")
		require.Equal(t, 1, code, out)
		for rank := range 3 {
			text := `rank 1 cannot: .*`
			if rank == 1 {
				text = `comm: windows: .*`
			}
			require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] worker: comm: join as rank .*: .*%s%s.*ncclSystemError`, rank, text, call), out)
		}
		require.Less(t, took, 2*time.Minute, out)
	}
}

// eachBackend runs a test of processes with virtual devices and with GPUs, of which gpus gets as many as there are ranks:
// it is testgpu.Ranks if they may share one, otherwise testgpu.CUDA.
func eachBackend(t *testing.T, virtual, cuda int, gpus func(testing.TB, int) []*device.Device, f func(t *testing.T, backend string, ranks int)) {
	t.Run("virtual", func(t *testing.T) { f(t, "virtual", virtual) })
	t.Run("cuda", func(t *testing.T) {
		gpus(t, cuda)
		f(t, "cuda", cuda)
	})
}

func job(t *testing.T, backend, fault string, ranks int, vars ...string) (code int, out string, took time.Duration) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	grace := time.Minute // a rank with a full stream, or on a busy machine, needs seconds to report and end
	if slices.Contains([]string{"absent", "sub", "stop", "flood stop"}, fault) {
		grace = 15 * time.Second // ranks stay until the launcher ends them
	}
	cfg, err := json.Marshal(&jobConfig{
		Ranks: ranks, Backend: backend, Grace: grace,
		Env: append(vars, faultVar+"="+fault, "CHORUS_BACKEND="+backend),
	})
	require.NoError(t, err)
	start := time.Now()
	cmd := exec.CommandContext(testgpu.Context(t), self)
	// A busy machine may stop a process for longer than the usual limit.
	cmd.Env = append(os.Environ(), launcherVar+"="+string(cfg), env.LostAfter.Name+"=20s")
	text, err := cmd.CombinedOutput()
	if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
		require.NoError(t, err)
	}
	return cmd.ProcessState.ExitCode(), string(text), time.Since(start)
}

// A jobConfig is what a launcher gets.
type jobConfig struct {
	Ranks   int
	Backend string
	Grace   time.Duration
	Env     []string
}

// launcherMain is the main function of a launcher. Each job has a process for it, so that jobs
// can run side by side: a launcher kills all its descendants when its job ends.
func launcherMain(text string) int {
	cfg := new(jobConfig)
	self, err := os.Executable()
	if err := errors.Join(err, json.Unmarshal([]byte(text), cfg), os.Unsetenv(launcherVar)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return launch.Run(context.Background(), &launch.Config{
		Program: []string{self},
		Procs:   cfg.Ranks,
		Devices: launch.Devices{Count: cfg.Ranks, Backend: cfg.Backend, Env: cfg.Env},
		Grace:   cfg.Grace,
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
	})
}
