package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testhost"
)

// hangingJob starts a job of 4 ranks, of which rank 1 hangs or is late. It returns the address of
// the metrics.
func hangingJob(t *testing.T, name, how string) (url string) {
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "4", "--job", name, "--metrics", "127.0.0.1:0", "--", self(t))
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual", hangVar+"="+how, meetVar+"="+t.TempDir(), "CHORUS_NCCL_TIMEOUT=5m", "CHORUS_GRACE=1s")
	out, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // the job may have ended
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait() // its code does not matter
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	found := regexp.MustCompile(`http://127\.0\.0\.1:\d+/`).FindString(line)
	require.NotEmpty(t, found, line)
	return found
}

// TestStatusOfAStraggler asks who is late in a job that goes on, by the command and by the metrics.
func TestStatusOfAStraggler(t *testing.T) {
	name := fmt.Sprintf("straggler-test-%d", os.Getpid())
	url := hangingJob(t, name, "late")
	eventually(t, asking(t, "status", "--job", name), regexp.MustCompile(`rank 1 \(host .*, process \d+\) arrives last in the group of 4 ranks: in \d+ of \d+ collectives that were compared, \d+\.\d ms after the others on average \(by `).MatchString)
	metrics := func() string { return get(t, url+"metrics") }
	eventually(t, metrics, regexp.MustCompile(`chorus_group_last_arrivals_total\{chorus_job="`+name+`",group="ranks-4",host="[^"]+",rank="1"\} [1-9]`).MatchString)
	eventually(t, metrics, regexp.MustCompile(`chorus_group_held_up_seconds_total\{chorus_job="`+name+`",group="ranks-4",host="[^"]+",rank="1"\} (0\.0*)?[1-9]`).MatchString)
}

func get(t *testing.T, url string) string {
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(text)
}

// TestStatusOfAHangingJob asks which rank is behind, by the command, the metrics and the page.
func TestStatusOfAHangingJob(t *testing.T) {
	name := fmt.Sprintf("status-test-%d", os.Getpid())
	url := hangingJob(t, name, "skip")
	var j monitor.Job
	behind := regexp.MustCompile(`^rank 1 \(host .*, process \d+\) is behind in the group of 4 ranks since \d+\.\d s: it has issued \d+ collectives, another rank \d+$`)
	eventually(t, asking(t, "status", "--job", name, "--json"), func(out string) bool {
		j = monitor.Job{}
		return json.Unmarshal([]byte(out), &j) == nil && len(j.Findings) == 1 && behind.MatchString(j.Findings[0]) &&
			len(j.Ranks) == 4 && !slices.ContainsFunc(j.Ranks, func(r monitor.Rank) bool { return len(r.Devices) != 1 || r.NCCL == "" })
	})
	for _, r := range j.Ranks {
		require.Equal(t, "running", r.State)
		require.Positive(t, r.Devices[0].Allocated)
		requireSources(t, &r)
	}
	// The rank that is behind comes first.
	eventually(t, asking(t, "status", "--job", name), regexp.MustCompile(`(?s)\nrank 1 \(host .*\nRANK +HOST [^\n]*\n1 +\S+ +\d+ +running `).MatchString)
	eventually(t, asking(t, "mem", "ledger", "--job", name), regexp.MustCompile(`\n3 +\S+ +virtual:3 +\S+ [KMG]?i?B +\S+% +buffers\n`).MatchString)
	metrics := func() string { return get(t, url+"metrics") }
	eventually(t, metrics, regexp.MustCompile(`chorus_group_lag_operations\{chorus_job="`+name+`",group="ranks-4",host="[^"]+",rank="1"\} 1\n`).MatchString)

	watchInTerminal(t, name)
	requireStopped(t, name, j.Ranks[2].PID)
}

// asking returns a function that runs the command and returns its output.
func asking(t *testing.T, args ...string) func() string {
	return func() string {
		out, errs, _ := chorusCommand(t, nil, args...)
		return out + errs
	}
}

// eventually asks until the answer is as expected. A rank that stalls has no report for a moment.
func eventually(t *testing.T, ask func() string, expected func(string) bool) {
	t.Helper()
	var last string
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if last = ask(); expected(last) {
			return
		}
		require.Less(t, time.Now(), deadline, last)
	}
}

// requireSources checks the parts of a report that only metrics have.
func requireSources(t *testing.T, r *monitor.Rank) {
	t.Helper()
	d := &r.Devices[0]
	require.Len(t, d.Pools, 2)
	require.Equal(t, d.Allocated, d.Pools[0].Allocated+d.Pools[1].Allocated)
	require.Equal(t, d.Reserved, d.Pools[0].Reserved+d.Pools[1].Reserved)
	require.Positive(t, d.Pools[0].PeakAllocated, "the job's buffers are small")
	require.Regexp(t, `^\d+\.\d+\.\d+$`, r.NCCL)
	require.Regexp(t, `^\d+\.\d$`, d.Driver)
	require.Equal(t, "virtual", d.Backend)
	require.NotEmpty(t, d.Product)
	require.NotEmpty(t, d.PCI)
}

// requireStopped stops a process, which then has no report.
func requireStopped(t *testing.T, name string, pid int) {
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	eventually(t, asking(t, "status", "--job", name), func(out string) bool {
		return strings.Contains(out, "\nrank 2 (host ") && regexp.MustCompile(`has no report: it did not answer|is lost: silent`).MatchString(out)
	})
}

// watchInTerminal runs chorus status --watch on a terminal until Ctrl-C.
func watchInTerminal(t *testing.T, name string) {
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Log("no pseudo-terminal here: ", err)
		return
	}
	defer screen.Close()
	var unlocked, number int32
	ioctl := func(request uintptr, arg unsafe.Pointer) {
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, screen.Fd(), request, uintptr(arg))
		require.Zero(t, errno)
	}
	ioctl(syscall.TIOCSPTLCK, unsafe.Pointer(&unlocked))
	ioctl(syscall.TIOCGPTN, unsafe.Pointer(&number))
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer tty.Close()
	cmd := exec.Command(self(t), "status", "--watch", "--job", name)
	cmd.Env = append(os.Environ(), commandVar+"=1", "TERM=xterm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Start())
	var shown strings.Builder
	buf := make([]byte, 4096)
	// Two frames, and more if rank 1 has no report for a moment, because it stalls.
	const behind = "rank 1 (host "
	for strings.Count(shown.String(), screenStart) < 2 || !strings.Contains(shown.String(), behind) {
		n, err := screen.Read(buf)
		require.NoError(t, err, shown.String())
		shown.Write(buf[:n])
	}
	_, err = screen.WriteString("\x03") // Ctrl-C
	require.NoError(t, err)
	_ = cmd.Wait() // the code is looked at
	require.Equal(t, 130, cmd.ProcessState.ExitCode())
	require.Contains(t, shown.String(), enterScreen)
	for _, line := range strings.Split(shown.String(), "\r\n") {
		require.LessOrEqual(t, len(line), 80+len(enterScreen+screenStart+clearLine+clearRest), "lines fit in 80 columns")
	}
}

// TestStatusOfAForeignJob asks a fake of NCCL's RAS service, and programs that are none.
func TestStatusOfAForeignJob(t *testing.T) {
	on := func(pid, allReduces, broadcasts int) testhost.RASRank {
		return testhost.RASRank{Host: "10.0.0.1", PID: pid, AllReduces: allReduces, Broadcasts: broadcasts}
	}
	addr := testhost.ServeRAS(t, testhost.RASAnswer(on(1, 6, 0), on(2, 6, 0), on(3, 5, 1), on(4, 6, 0)))
	out, errs, code := chorusCommand(t, nil, "status", "--ras", addr, "--pause", "10ms")
	require.Zero(t, code, errs)
	require.Regexp(t, `communicator 0x5c1d8d1a3f0b2c44 of 4 ranks: rank 2 \(process 3 on host 10\.0\.0\.1\) is in another operation: it has launched 1 Broadcast and not 0, and 5 AllReduce and not 6 as most other ranks; no rank has launched anything in [0-9.]+ s, and sends and receives do not count\n`, out)
	require.Regexp(t, `\n0x5c1d8d1a3f0b2c44 +stuck +2 of 4 +10\.0\.0\.1 +3 +2 +ok +7 +0 +0 +AllGather 1, AllReduce 5, Broadcast 1\n`, out)
	out, errs, code = chorusCommand(t, nil, "status", "--ras", addr, "--pause", "10ms", "--json")
	require.Zero(t, code, errs)
	var s analyze.RASState
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	require.Len(t, s.Findings, 1)

	foreign := testhost.Listen(t, func(c net.Conn) { _, _ = io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n") })
	_, errs, code = chorusCommand(t, nil, "status", "--ras", foreign)
	require.Equal(t, 1, code)
	require.Contains(t, errs, foreign+`: the answer to the handshake is "SSH-2.0-OpenSSH_9.2" and not SERVER PROTOCOL: another program than NCCL's RAS service listens there`)
	part := testhost.RASAnswer(on(1, 6, 0))
	_, errs, code = chorusCommand(t, nil, "status", "--ras", testhost.ServeRAS(t, part[:400]))
	require.Equal(t, 1, code)
	require.Contains(t, errs, "it is cut off after 400 bytes")
	_, errs, code = chorusCommand(t, nil, "status", "--ras", "127.0.0.1:1")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "connection refused: NCCL 2.28.7 and newer listen at NCCL_RAS_ADDR")
	_, errs, code = chorusCommand(t, nil, "status", "--ras", "")
	require.Equal(t, 64, code)
	require.Contains(t, errs, "--ras is empty: want HOST:PORT")
	_, errs, code = chorusCommand(t, nil, "status", "--ras", "nowhere")
	require.Equal(t, 64, code)
	require.Contains(t, errs, `--ras "nowhere": address nowhere: missing port in address: want HOST:PORT`)
	_, errs, code = chorusCommand(t, nil, "status", "--ras", addr, "--job", "x")
	require.Equal(t, 64, code)
	require.Contains(t, errs, "--ras excludes --watch, --job and --pid")
}

func TestStatusWithoutAJob(t *testing.T) {
	ask := func() string { // jobs of other tests may not answer for a moment
		out, errs, code := chorusCommand(t, nil, "status", "--job", "no-such-job")
		require.Equal(t, launch.ExitFailed, code)
		require.Empty(t, out)
		return errs
	}
	eventually(t, ask, func(errs string) bool {
		return errs == "chorus: this user runs no job \"no-such-job\" of chorus run on this host\n"
	})
}

func TestStatusFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"--watch and --json exclude each other":  {"status", "--watch", "--json"},
		"--watch needs a terminal as its output": {"status", "--watch"},
		"unknown argument":                       {"status", "job"},
		"the host is missing":                    {"run", "--metrics", ":9400", "--", "true"},
		"want host:port":                         {"run", "--metrics", "9400", "--", "true"},
	} {
		_, errs, code := chorusCommand(t, nil, args...)
		require.Equal(t, launch.ExitUsage, code, errs)
		require.Contains(t, errs, want)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	_, errs, code := chorusCommand(t, nil, "run", "--nproc-per-node", "1", "--metrics", taken.Addr().String(), "--", "true")
	require.Equal(t, launch.ExitFailed, code, "another attempt may succeed: %s", errs)
	require.Contains(t, errs, "choose another one with --metrics or CHORUS_METRICS")
	_, errs, code = chorusCommand(t, []string{"CHORUS_METRICS=:1"}, "run", "--nproc-per-node", "1", "--", "true")
	require.Equal(t, launch.ExitUsage, code, errs)
	_, errs, code = chorusCommand(t, nil, "run", "--nproc-per-node", "1", "--metrics", "0.0.0.0:0", "--", "true")
	require.Zero(t, code, errs)
	require.Contains(t, errs, "warning: everyone who reaches [::]:")
}

// hangVar turns the test binary into a worker whose rank 1 lets the job hang: "skip" omits a
// collective, "orders" uses two groups in another order than the other ranks. With "late" the job goes on, and rank 1 comes
// late to each collective.
const hangVar = "CHORUS_TEST_HANG"

// meetVar is the folder of awaitAll.
const meetVar = "CHORUS_TEST_MEET"

// hang is the worker. It returns the exit code.
func hang(how string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := hangIn(ctx, how); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1
	}
	return 0
}

func hangIn(ctx context.Context, how string) error {
	g, err := comm.Init(ctx, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	sub, err := g.Sub(ctx, 2, 1)
	if err != nil {
		return err
	}
	xs, err := comm.Make[float32](g, 1000)
	if err != nil {
		return err
	}
	defer xs.Close()
	reduce := func(g *comm.Group) error {
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			return err
		}
		return g.Wait(ctx)
	}
	for range 2 {
		if err := reduce(g); err != nil {
			return err
		}
	}
	for how == "late" && ctx.Err() == nil {
		if g.Rank() == 1 {
			time.Sleep(20 * time.Millisecond) // its work
		}
		if err := reduce(g); err != nil {
			return err
		}
	}
	switch {
	case how == "skip" && g.Rank() == 1:
		err = poll.Until(ctx, func() (bool, error) { return false, g.Err() })
	case how == "orders" && g.Rank() == 1:
		err = reduce(sub)
	default:
		err = reduce(g)
	}
	return errors.Join(err, awaitAll(ctx, g.Rank(), g.Size()))
}

// awaitAll waits until all ranks have called it, so that the launcher ends no worker before the
// worker has written its files.
func awaitAll(ctx context.Context, rank, size int) error {
	name := func(rank int) string { return filepath.Join(os.Getenv(meetVar), fmt.Sprint(rank)) }
	if err := os.WriteFile(name(rank), nil, 0o600); err != nil {
		return err
	}
	return poll.Until(ctx, func() (bool, error) {
		for other := range size {
			if _, err := os.Stat(name(other)); err != nil {
				return false, nil
			}
		}
		return true, nil
	})
}

// TestAnalyze lets jobs of real processes hang, and analyzes the files that they leave.
func TestAnalyze(t *testing.T) {
	for how, want := range map[string]struct {
		kind     string
		culprits []int
		text     string
	}{
		"skip":   {analyze.KindBehind, []int{1}, `^Rank 1 .* has not issued collective \d+ \(all_reduce\(1000 x Float, sum\)\) of .* Its last operation is collective \d+ \(all_reduce\(1000 x Float, sum\)\) of .*, completed`},
		"orders": {analyze.KindOrder, []int{1, 2}, `waits for rank 1 .* in collective \d+ \(all_reduce`},
	} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			out, errs, code := chorusCommand(t, []string{hangVar + "=" + how, meetVar + "=" + t.TempDir(), "CHORUS_NCCL_TIMEOUT=3s", "CHORUS_NCCL_TRACE_FILE=" + filepath.Join(dir, "trace-")},
				"run", "--nproc-per-node", "3", "--", self(t))
			require.NotZero(t, code, out+errs)
			out, errs2, code := chorusCommand(t, nil, "analyze", "--json", dir)
			require.Equal(t, 1, code, out+errs2+errs)
			var r analyze.Report
			require.NoError(t, json.Unmarshal([]byte(out), &r))
			require.Equal(t, want.kind, r.Kind, out+errs)
			require.Regexp(t, want.text, r.Verdict)
			var culprits []int
			for _, c := range r.Culprits {
				culprits = append(culprits, *c.World)
			}
			require.ElementsMatch(t, want.culprits, culprits, r.Verdict)
		})
	}
}

func TestAnalyzeCommand(t *testing.T) {
	const torch = "../../internal/analyze/testdata/torch"
	out, errs, code := chorusCommand(t, nil, "analyze", torch)
	require.Equal(t, 1, code, errs)
	require.Regexp(t, `^Rank 1 has not issued collective 3`, out)
	require.Contains(t, out, "default_pg, 2 ranks\nRANK ")
	_, errs, code = chorusCommand(t, nil, "analyze")
	require.Equal(t, 64, code)
	require.Contains(t, errs, "no file or folder given; see chorus analyze --help")
	_, _, code = chorusCommand(t, nil, "analyze", "--colour", torch)
	require.Equal(t, 64, code)
	_, errs, code = chorusCommand(t, nil, "analyze", filepath.Join(t.TempDir(), "no"))
	require.Equal(t, 1, code)
	require.Contains(t, errs, "no such file")
}
