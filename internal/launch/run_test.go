package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/testhost"
)

func TestRunAllWell(t *testing.T) {
	t.Parallel()
	code, text := launchAll(t, workers(3, "shutdown"))
	require.Zero(t, code, text)
	for r := range 3 {
		require.Contains(t, text, fmt.Sprintf("[rank %d] attached %d of 3\n", r, r))
	}
}

func TestRunEnvironment(t *testing.T) {
	t.Parallel()
	code, text := launchAll(t, shell(2, `echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $CHORUS_RANK $OMP_NUM_THREADS $TORCHELASTIC_RUN_ID"; cat`),
		"OMP_NUM_THREADS=7")
	require.Zero(t, code, text)
	require.Contains(t, text, "[rank 1] 1/2 1/2 0/1 1 7 test\n")
}

func TestRunWorkerFails(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		deed string
		code int
		text string
	}{
		{"exit3", 3, "exited with code 3 after "},
		{"panic", 2, "exited with code 2 after "},
		{"kill", 137, "killed by SIGKILL ("},
		{"stop", 1, fmt.Sprintf(": silent for %v: stopped, starved or unreachable", silentAfter)},
	} {
		t.Run(tc.deed, func(t *testing.T) {
			t.Parallel()
			cfg := workers(3, "1", tc.deed)
			if tc.deed == "stop" {
				cfg.noticingSilence()
			}
			cfg.Grace = time.Hour // the others end by themselves, and nobody waits for the one that is stopped
			code, text := launchAll(t, cfg)
			require.Equal(t, tc.code, code, text)
			last := text[strings.LastIndex(text, "chorus: rank 1 (host h0, pid "):]
			require.Contains(t, last, tc.text)
			require.Contains(t, last, "; the other 2 ranks ended with it\n")
			// The first failure is the cause that the other ranks see, too.
			require.NotContains(t, text, "chorus: rank 0")
		})
	}
}

// The others of a rank that fails have time to say what they know about it before they are asked to end.
func TestRunHearsTheOthers(t *testing.T) {
	t.Parallel()
	code, text := launchAll(t, workers(3, "1", "exit3 when all have come", "300ms"))
	require.Equal(t, 3, code, text)
	for _, rank := range []int{0, 2} {
		require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] session: cluster: rank 1 .* exited with code 3`, rank), text)
	}
	// One that is stopped is not asked to end while the others may have something to say.
	_, text = launchAll(t, workers(3, "1", "stop when all have come", "300ms").noticingSilence())
	for _, rank := range []int{0, 2} {
		require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] session: cluster: rank 1 .* silent`, rank), text)
	}
}

// failsBesideTrap is a job whose rank 1 runs fail after rank 0 is ready to run last at SIGTERM.
func failsBesideTrap(t *testing.T, fail, last string) *setup {
	cfg := shell(2, fmt.Sprintf(`ready=%s/ready
if [ $RANK = 1 ]; then while [ ! -e $ready ]; do sleep 0.02; done; %s; fi
trap '%s; exit 0' TERM; : >$ready; while :; do sleep 0.05; done`, t.TempDir(), fail, last))
	cfg.Grace = 3 * time.Second
	return cfg
}

// The others of a rank that fails are asked to end if they do not end by themselves, and then write more lines.
func TestRunQuotesBuriedLines(t *testing.T) {
	t.Parallel()
	cfg := failsBesideTrap(t, "echo the cause >&2; exit 5", "echo noise; echo noise")
	code, text := launchAll(t, cfg)
	require.Equal(t, 5, code, text)
	require.Contains(t, text, "noise")
	require.True(t, strings.HasSuffix(text, "chorus: the last lines of rank 1's stderr were:\n    the cause\n"), text)
}

// TestRunQuotesPanic buries a panic whose trace is longer than what is quoted.
func TestRunQuotesPanic(t *testing.T) {
	t.Parallel()
	cfg := failsBesideTrap(t, `echo before >&2; echo 'panic: a bug' >&2; i=1; while [ $i -le 30 ]; do echo "trace $i" >&2; i=$((i+1)); done; exit 2`, "echo noise")
	code, text := launchAll(t, cfg)
	require.Equal(t, 2, code, text)
	require.Contains(t, text, "rank 1's stderr were:\n    panic: a bug\n    trace 1\n")
	require.True(t, strings.HasSuffix(text, "\n    trace 11\n"), text)
}

func TestTail(t *testing.T) {
	var tl tail
	for i := range keptLines {
		tl.add(fmt.Append(nil, i), '\n')
	}
	require.Len(t, tl.last(), lastLines)
	require.Equal(t, fmt.Sprint(keptLines-1), tl.last()[lastLines-1])
	tl.add([]byte("\tmain.go:7\x1b"), '\n') // as in a stack
	require.Equal(t, "\tmain.go:7\\x1b", tl.last()[lastLines-1])
	tl.add([]byte("fatal error: all goroutines are asleep - deadlock!"), '\n')
	for range keptLines - 1 {
		tl.add([]byte("x"), '\n')
	}
	require.Len(t, tl.last(), panicLines)
	require.Equal(t, "fatal error: all goroutines are asleep - deadlock!", tl.last()[0])
	tl.add([]byte("x"), '\n')
	require.Equal(t, slices.Repeat([]string{"x"}, lastLines), tl.last())
}

// TestOutputReaderGone writes to a pipe that breaks: once is enough to know.
func TestOutputReaderGone(t *testing.T) {
	var out, errs broken
	o := &output{out: &sink{w: &out}, err: &sink{w: &errs}, tails: map[*child]*tail{}}
	c := &child{}
	errs.fine = true
	for range 3 {
		o.emit(&stream{from: c, to: o.out}, []byte("a\n"), false)
		o.emit(&stream{from: c, to: o.err, stderr: true}, []byte("b\n"), false)
	}
	require.Equal(t, []int{1, 3}, []int{out.calls, errs.calls})
	require.Len(t, o.tails[c].lines, 3)
}

type broken struct {
	calls int
	fine  bool
}

func (b *broken) Write(p []byte) (int, error) {
	b.calls++
	if b.fine {
		return len(p), nil
	}
	return 0, syscall.EPIPE
}

// TestRunFailsWhereNobodyReads has a worker fail after more than the reader of the output
// takes: the job ends with what it can say on the other one.
func TestRunFailsWhereNobodyReads(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	l := startTo(t, w, shell(1, "head -c 100000 /dev/zero; echo too bad >&2; exit 3"))
	require.NoError(t, w.Close())
	code, text := l.wait()
	require.Equal(t, 3, code, text)
	require.Contains(t, text, "[rank 0] too bad\n")
	require.Contains(t, text, "chorus: rank 0 (host h0, ")
}

// TestRunCannotWrite has a disk that is full under the output.
func TestRunCannotWrite(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("needs /dev/full: %v", err)
	}
	l := startTo(t, full, shell(2, "echo a; echo b"))
	require.NoError(t, full.Close())
	code, text := l.wait()
	require.Equal(t, ExitFailed, code, text)
	require.Equal(t, 1, strings.Count(text, "chorus: stopped writing the output of the ranks: "), text)
	require.Contains(t, text, "no space left on device")
}

// TestRunPaused stops the launcher for longer than silence is borne, as Ctrl-Z
// does. Its own workers see that it will be back. When all were stopped, as a
// freezer does, those that come back later are given time, too.
func TestRunPaused(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"launcher", "all"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			cfg := workers(2, "all", "shutdown when told")
			cfg.Timing.LostAfter = 3 * time.Second
			l := start(t, cfg)
			l.until("listening", 2)
			pids := []int{l.cmd.Process.Pid}
			if who == "all" {
				pids = append(pids, pidsIn(t, l.text(), "listening")...)
			}
			for _, pid := range pids {
				require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
				requireStopped(t, pid)
			}
			time.Sleep(cfg.Timing.LostAfter * 3 / 2) // the pause itself
			for i, pid := range pids {
				if i == 1 {
					time.Sleep(cfg.Timing.LostAfter / 4) // theirs is longer
				}
				require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
			}
			require.NoError(t, l.cmd.Process.Signal(syscall.SIGUSR1))
			code, text := l.wait()
			require.Zero(t, code, text)
			require.NotContains(t, text, "lost")
		})
	}
}

func TestRunCleanExits(t *testing.T) {
	t.Parallel()
	// A worker without a session may end early.
	code, text := launchAll(t, shell(2, `[ $RANK = 0 ] || sleep 0.2`))
	require.Zero(t, code, text)
	// So may one that closed its session; but not one that has it open.
	code, text = launchAll(t, workers(2, "1", "exit0"))
	require.Equal(t, 43, code, text)
	first, second, _ := strings.Cut(text[strings.Index(text, "chorus: "):], "\n")
	require.Contains(t, first, "chorus: rank 1 (host h0, pid ")
	require.Contains(t, first, "exited with code 0 without Close or Shutdown of its session, which ended the sessions of the others")
	require.Contains(t, second, "chorus: then rank 0 (host h0, pid ")
	require.Contains(t, second, "exited with code 43 after ")
}

func TestRunExitBeforeAttach(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	code, text := launchAll(t, shell(2, `[ $RANK = 1 ] || exec `+self+` worker shutdown`))
	require.Equal(t, 41, code, text)
	require.Contains(t, text, "attach: cluster: rank 1 (host h0, pid ")
	require.Contains(t, text, "exited with code 0 before it joined")
}

func TestRunSignals(t *testing.T) {
	t.Parallel()
	t.Run("graceful", func(t *testing.T) {
		t.Parallel()
		l := start(t, shell(2, `trap 'echo stopping; exit 0' TERM; echo ready; while :; do sleep 0.05; done`))
		l.until("ready", 2)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM))
		code, text := l.wait()
		require.Equal(t, 128+15, code, text)
		requireFromEach(t, text, 2, "stopping")
		require.Contains(t, text, "chorus: received SIGTERM; stopped the 2 ranks\n")
	})
	t.Run("twice", func(t *testing.T) {
		t.Parallel()
		cfg := shell(2, `trap 'echo no' INT TERM; echo ready; while :; do sleep 0.05; done`)
		cfg.Grace = time.Hour // which the second signal ends
		l := start(t, cfg)
		l.until("ready", 2)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGINT))
		l.until("no", 2)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGINT))
		code, text := l.wait()
		require.Equal(t, 128+2, code, text)
	})
	t.Run("once", func(t *testing.T) {
		t.Parallel()
		// The child ignores SIGINT. It would run the traps too until it is another program.
		cfg := shell(2, `trap 'echo int' INT; trap 'echo term' TERM
sleep 1000 & until read name </proc/$!/comm && [ $name = sleep ]; do :; done; echo ready; while :; do wait; done`)
		cfg.Grace = 3 * time.Second
		l := start(t, cfg)
		l.until("ready", 2)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGINT))
		code, text := l.wait()
		require.Equal(t, 128+2, code, text)
		require.Equal(t, []int{2, 0}, []int{strings.Count(text, "] int"), strings.Count(text, "] term")}, "a second signal makes many programs end at once: %s", text)
	})
	t.Run("grace", func(t *testing.T) {
		t.Parallel()
		cfg := shell(1, `trap '' TERM; echo ready; while :; do sleep 0.05; done`)
		cfg.Grace = 200 * time.Millisecond
		l := start(t, cfg)
		l.until("ready", 1)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM))
		code, _ := l.wait()
		require.Equal(t, 128+15, code)
	})
	t.Run("to a worker that is stopped", func(t *testing.T) {
		t.Parallel()
		l := start(t, shell(1, `trap 'echo stopping; exit 0' TERM; echo me $$; kill -STOP $$; while :; do sleep 0.05; done`))
		l.until("me", 1)
		requireStopped(t, pidsIn(t, l.text(), "me")[0])
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM))
		code, text := l.wait()
		require.Equal(t, 128+15, code, text)
		require.Contains(t, text, "stopping", "it was continued, not killed")
	})
	t.Run("to grandchildren", func(t *testing.T) {
		t.Parallel()
		l := start(t, shell(1, `trap '' TERM; (trap 'echo child stopping; exit 0' TERM; echo ready; while :; do sleep 0.05; done) & wait; wait`))
		l.until("ready", 1)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM))
		code, text := l.wait()
		require.Equal(t, 128+15, code, text)
		require.Contains(t, text, "child stopping")
	})
	t.Run("forwarded", func(t *testing.T) {
		t.Parallel()
		l := start(t, shell(2, `trap 'echo usr; exit 0' USR1; echo ready; while :; do sleep 0.05; done`))
		l.until("ready", 2)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGUSR1))
		code, text := l.wait()
		require.Zero(t, code, text)
		requireFromEach(t, text, 2, "usr")
	})
}

// requireFromEach requires that every rank printed line, once or more: a shell's
// child that is signalled before it becomes another program runs the trap too.
func requireFromEach(t *testing.T, text string, ranks int, line string) {
	t.Helper()
	for r := range ranks {
		require.Contains(t, text, fmt.Sprintf("[rank %d] %s\n", r, line))
	}
}

// TestRunLeavesNothing starts grandchildren in the worker's group and out of
// it, and ends the workers in every way.
func TestRunLeavesNothing(t *testing.T) {
	const grandchildren = `sleep 100 & echo in $!; setsid sleep 100 & echo out $!; echo me $$; `
	t.Run("exit", func(t *testing.T) {
		t.Parallel()
		code, text := launchAll(t, shell(2, grandchildren+`[ $RANK = 0 ]`))
		require.Equal(t, 1, code, text)
		for _, w := range []string{"in", "out", "me"} {
			requireGone(t, pidsIn(t, text, w))
		}
	})
	t.Run("well", func(t *testing.T) {
		t.Parallel()
		code, text := launchAll(t, shell(2, grandchildren))
		require.Zero(t, code, text)
		requireGone(t, append(pidsIn(t, text, "in"), pidsIn(t, text, "out")...))
	})
	// A launcher that is killed leaves that to its guardian, which neither the
	// signal of the launcher's group nor one to all processes of the job ends.
	for _, who := range []string{"launcher", "launcher's group"} {
		t.Run(who+" killed", func(t *testing.T) {
			t.Parallel()
			l := start(t, shell(3, `sleep 7777 & echo in $!; sleep 7778 & echo in $!; echo me $$; wait`))
			l.until("me", 3)
			pids := append(pidsIn(t, l.text(), "me"), pidsIn(t, l.text(), "in")...)
			require.Len(t, pids, 9)
			pid := l.cmd.Process.Pid
			guardian := guardianOf(t, pid)
			pids = append(pids, guardian)
			for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGTERM} {
				requireIgnores(t, guardian, sig)
				require.NoError(t, syscall.Kill(guardian, sig))
			}
			if who != "launcher" {
				pid = -pid
			}
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			requireGone(t, pids)
		})
	}
	t.Run("guardian", func(t *testing.T) {
		t.Parallel()
		l := start(t, shell(1, `sleep 100 & echo in $!; trap 'exit 0' USR1; echo ready; while :; do sleep 0.05; done`))
		l.until("ready", 1)
		guardian := guardianOf(t, l.cmd.Process.Pid)
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGUSR1))
		code, text := l.wait()
		require.Zero(t, code, text)
		require.Zero(t, job.ProcessOf(guardian), "it has been awaited")
	})
}

// TestOrphans reads what launchers say before they end.
func TestOrphans(t *testing.T) {
	for text, want := range map[string]map[int]bool{
		"":                                      {},
		"started 10\nstarted 11\nended 10\n":    {11: true},
		"started 1\nstarted 0\nstarted -5\nx\n": {},
	} {
		require.Equal(t, want, orphans(strings.NewReader(text)), text)
	}
}

// TestForgedLines lets a worker write as if it were another rank or the launcher.
func TestForgedLines(t *testing.T) {
	t.Parallel()
	const script = `printf 'mine\r[rank 7] forged\n\r\033[2Jchorus: done\r\n\n10%%\r20%%\rend'`
	cfg := shell(1, script)
	cfg.LogDir = t.TempDir()
	code, text := launchAll(t, cfg)
	require.Zero(t, code)
	require.Equal(t, "[rank 0] mine\n[rank 0] [rank 7] forged\n[rank 0] \\x1b[2Jchorus: done\n[rank 0] \n[rank 0] 10%\n[rank 0] 20%\n[rank 0] end\n", text)
	const written = "mine\r[rank 7] forged\n\r\x1b[2Jchorus: done\r\n\n10%\r20%\rend"
	b, err := os.ReadFile(filepath.Join(cfg.LogDir, "test", "rank-0.out"))
	require.NoError(t, err)
	require.Equal(t, written, string(b), "the log has it byte for byte")

	cfg = shell(1, script)
	cfg.Raw = true
	code, text = launchAll(t, cfg)
	require.Zero(t, code)
	require.Equal(t, "[rank 0] "+strings.ReplaceAll(written, "\n", "\n[rank 0] ")+"\n", text)
	cfg.NoPrefix = true
	code, text = launchAll(t, cfg)
	require.Zero(t, code)
	require.Equal(t, written, text, "as it would be without a launcher")

	var tl tail
	for piece, end := range pieces([]byte("a\x1b[2J\r\n10%\r20%\rwait"), false) {
		tl.add(piece, end)
	}
	tl.add([]byte(" for it"), '\n')
	require.Equal(t, []string{`a\x1b[2J`, "wait for it"}, tl.last(), "the last of the pieces of progress")
}

// TestOutputAtOnce reads progress, a prompt and half a letter while the worker waits for an answer.
func TestOutputAtOnce(t *testing.T) {
	for _, raw := range []bool{false, true} {
		got, w := io.Pipe()
		o := &output{prefix: true, raw: raw, out: &sink{w: w}}
		read := func(want string) {
			t.Helper()
			b := make([]byte, len(want))
			_, err := io.ReadFull(got, b) // blocks until it has come
			require.NoError(t, err)
			require.Equal(t, want, string(b))
		}
		var workers [2]*os.File
		for rank := range workers {
			c := &child{rankNow: func() int { return rank }, known: make(chan struct{})}
			close(c.known)
			var err error
			workers[rank], _, err = o.pipe(c, false)
			require.NoError(t, err)
		}
		say := func(rank int, text string) {
			_, err := workers[rank].WriteString(text)
			require.NoError(t, err)
		}
		say(0, "step 1\r")
		end := map[bool]string{false: "\n", true: "\r"}[raw]
		read("[rank 0] step 1" + end)
		say(0, "step 2\r")
		read(map[bool]string{false: "[rank 0] ", true: ""}[raw] + "step 2" + end)
		say(0, "\nname? \xe6\x97")
		read(map[bool]string{false: "", true: "\n"}[raw] + "[rank 0] name? ")
		say(0, "\xa5!")
		read("日!")
		say(1, "hello\n")
		read("\n[rank 1] hello\n")
		say(0, "more \x1b[3")
		read("[rank 0] more ")
		say(0, "1mred\n")
		read(map[bool]string{false: `\x1b[31mred`, true: "\x1b[31mred"}[raw] + "\n")
		for _, f := range workers {
			require.NoError(t, f.Close())
		}
		o.wg.Wait()
	}
}

func TestCut(t *testing.T) {
	for text, want := range map[string]string{
		"":                                       "",
		"abc":                                    "abc",
		"é":                                      "é",
		"a\xc3":                                  "a",
		"a\xe6\x97":                              "a",
		"a\xf0\x9f\x98":                          "a",
		"a\x97\x97\x97\x97":                      "a\x97\x97\x97\x97", // not UTF-8
		"a\xff":                                  "a\xff",
		"a\x1b":                                  "a",
		"a\x1b[":                                 "a",
		"a\x1b[1;3":                              "a",
		"a\x1b[1;31m":                            "a\x1b[1;31m",
		"a\x1b[1;31mb":                           "a\x1b[1;31mb",
		"a\x1b]0;title":                          "a",
		"a\x1b]0;title\x1b":                      "a",
		"a\x1b]0;title\x1b\\":                    "a\x1b]0;title\x1b\\",
		"a\x1b]0;title\a":                        "a\x1b]0;title\a",
		"a\x1bM":                                 "a\x1bM",
		"a\x1b(":                                 "a",
		"a\x1b[31mb\x1b[0":                       "a\x1b[31mb",
		"a\x1b[31m\xe6":                          "a\x1b[31m",
		"\x1b[" + strings.Repeat("1", maxEscape): "\x1b[" + strings.Repeat("1", maxEscape),
	} {
		require.Equal(t, want, text[:cut([]byte(text))], "%q", text)
	}
}

// TestLongLine splits a line of letters of three bytes, at whole letters.
func TestLongLine(t *testing.T) {
	t.Parallel()
	const script = `yes 日本語 | head -n 30000 | tr -d '\n'`
	raw := shell(1, script)
	raw.Raw = true
	code, text := launchAll(t, raw)
	require.Zero(t, code)
	require.Equal(t, "[rank 0] "+strings.Repeat("日本語", 30000)+"\n", text)
	code, text = launchAll(t, shell(1, script))
	require.Zero(t, code)
	require.NotContains(t, text, `\x`)
	require.Equal(t, 30000, strings.Count(strings.ReplaceAll(text, "\n[rank 0] ", ""), "日本語"))
}

// TestZombies has a worker whose orphans end. Nobody but the launcher collects them.
func TestZombies(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	code, text := launchAll(t, shell(1, `
for round in 1 2 3; do
	for i in 1 2 3 4 5; do sh -c 'sleep 0 & echo orphan $!' ; done
	while grep -qs ") Z $PPID " /proc/[0-9]*/stat; do sleep 0.02; done
done
echo none left`))
	require.Zero(t, code)
	require.Contains(t, text, "none left")
	require.Equal(t, 15, strings.Count(text, "orphan"))
	require.Less(t, time.Since(begin), time.Minute)
}

// TestLogsFollowNoPlantedLinks gives the launcher a folder of logs in which another user
// has prepared what it will write.
func TestLogsFollowNoPlantedLinks(t *testing.T) {
	t.Parallel()
	target := filepath.Join(t.TempDir(), "precious")
	require.NoError(t, os.WriteFile(target, []byte("precious"), 0o600))
	type planted struct {
		plant func(dir, file string) error
		want  string
	}
	cases := map[string]planted{
		"a link as a log":    {func(_, file string) error { return os.Symlink(target, file) }, "is a symbolic link, which is not followed"},
		"a hard link":        {func(_, file string) error { return os.Link(target, file) }, "the file has 2 names"},
		"a pipe as a log":    {func(_, file string) error { return syscall.Mkfifo(file, 0o666) }, "not a regular file but a named pipe"},
		"a folder of others": {func(dir, _ string) error { return os.Chmod(dir, 0o777) }, "lets other users write to it"},
		"a link as folder": {func(dir, _ string) error {
			return errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(dir+"-moved", dir))
		}, "is a symbolic link, which is not followed"},
	}
	if os.Geteuid() == 0 { // only root can give a file to another user
		const otherUser = 65534
		cases["another user's folder"] = planted{func(dir, _ string) error { return os.Chown(dir, otherUser, otherUser) }, "belongs to the user with id 65534"}
		cases["another user's log"] = planted{func(_, file string) error {
			return errors.Join(os.WriteFile(file, nil, 0o666), os.Chown(file, otherUser, otherUser))
		}, "belongs to the user with id 65534"}
	}
	for name, c := range cases {
		logs := t.TempDir()
		dir := filepath.Join(logs, "test") // the job's name
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, c.plant(dir, filepath.Join(dir, "rank-0.out")), name)
		cfg := shell(1, "echo overwritten")
		cfg.LogDir = logs
		code, text := launchAll(t, cfg)
		require.Equal(t, ExitFailed, code, name)
		require.Contains(t, text, c.want, name)
		b, err := os.ReadFile(target)
		require.NoError(t, err)
		require.Equal(t, "precious", string(b), name)
	}
}

// TestLogsInUse starts a second job with the name and the folder of a running one, whose rank 0 has already exited. It is refused before
// it has emptied any file.
func TestLogsInUse(t *testing.T) {
	t.Parallel()
	logs := t.TempDir()
	cfg := shell(2, "echo first of $RANK; [ $RANK = 0 ] || read line < "+filepath.Join(logs, "end"))
	cfg.LogDir = logs
	require.NoError(t, syscall.Mkfifo(filepath.Join(logs, "end"), 0o600))
	holds := func(rank int, want string) {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(logs, "test", fmt.Sprintf("rank-%d.out", rank)))
		require.NoError(t, err)
		require.Equal(t, want, string(b))
	}
	first := start(t, cfg)
	first.until("first of", 2)
	second := shell(2, "echo second")
	second.LogDir = logs
	for range 2 {
		code, text := launchAll(t, second)
		require.Equal(t, ExitFailed, code, text)
		require.Contains(t, text, "open a log file: lock "+filepath.Join(logs, "test", "rank-0.out")+
			": another process writes to it: another launcher of a job with this name and folder is running: choose another --job or --log-dir, or wait for its end")
		holds(0, "first of 0\n")
	}
	require.NoError(t, os.WriteFile(filepath.Join(logs, "end"), []byte("\n"), 0o600))
	code, text := first.wait()
	require.Zero(t, code, text)
	holds(0, "first of 0\n")
	holds(1, "first of 1\n")
	code, text = launchAll(t, second)
	require.Zero(t, code, text)
	holds(1, "second\n")
}

// TestFileNames: different jobs have different folders, in the folder of all logs.
func TestFileNames(t *testing.T) {
	for name, want := range map[string]string{
		"x": "x", "../x": "..%2Fx", "a/x": "a%2Fx", "a%2Fx": "a%252Fx", "/x": "%2Fx", "x/": "x%2F", ".": "%2E", "..": "%2E%2E", "a b": "a b", "...": "...", "%2E": "%252E",
	} {
		require.Equal(t, want, fileName(name))
		require.Equal(t, want, filepath.Base(filepath.Join("/logs", fileName(name))))
	}
}

// TestNamesOfLogs: no two workers of a launcher have one file, also if both come later, before their ranks are decided.
func TestNamesOfLogs(t *testing.T) {
	cfg := &Config{LogDir: t.TempDir()}
	o, err := newOutput(cfg, "a/b", func(string) {})
	require.NoError(t, err)
	defer o.close()
	for _, c := range []*child{{rank: 1}, {rank: 1, again: 1}, {rank: -1, late: true}, {local: 1, rank: -1, late: true}, {rank: 0, late: true, again: 1},
		{local: 1, rank: 0, late: true, again: 1}, {local: 1, rank: 0, late: true, again: 1}} {
		require.NoError(t, o.openLogs(c, "h/0"))
		require.NotNil(t, c.logs[0])
		require.NotNil(t, c.logs[1])
	}
	found, err := filepath.Glob(filepath.Join(cfg.LogDir, "a%2Fb", "*.err"))
	require.NoError(t, err)
	for i := range found {
		found[i] = filepath.Base(found[i])
	}
	require.Equal(t, []string{"new-h%2F0-0.err", "new-h%2F0-0.restart-1.err", "new-h%2F0-1.err", "new-h%2F0-1.restart-1.2.err", "new-h%2F0-1.restart-1.err",
		"rank-1.err", "rank-1.restart-1.err"}, found)
}

// TestStartCode: only a program that the kernel refuses is a mistake of the command line.
func TestStartCode(t *testing.T) {
	for errno, want := range map[syscall.Errno]int{syscall.ENOEXEC: ExitNotRunnable, syscall.EACCES: ExitNotRunnable, syscall.ENOENT: ExitNotRunnable,
		syscall.EAGAIN: ExitFailed, syscall.ENOMEM: ExitFailed, syscall.EMFILE: ExitFailed} {
		require.Equal(t, want, startCode(&os.PathError{Op: "fork/exec", Path: "program", Err: errno}), errno)
		require.Equal(t, ExitFailed, startCode(fmt.Errorf("open a log file: %w", &os.PathError{Op: "open", Path: "rank-0.out", Err: errno})), errno)
	}
	require.Equal(t, ExitFailed, startCode(os.NewSyscallError("pipe2", syscall.EMFILE)))
}

func TestRunOutput(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := shell(2, `i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done; head -c 150000 /dev/zero | tr '\0' x; echo; printf partial; printf e >&2`)
	cfg.LogDir = dir
	code, text := launchAll(t, cfg)
	require.Zero(t, code)
	for r := range 2 {
		var lines []string
		xs := 0
		for line := range strings.Lines(text) {
			line, mine := strings.CutPrefix(line, fmt.Sprintf("[rank %d] ", r))
			if !mine {
				require.True(t, strings.HasPrefix(line, "[rank "), "line of nobody: %.40q", line)
				continue
			}
			require.LessOrEqual(t, len(line), maxLine+1)
			xs += strings.Count(line, "x")
			if strings.HasPrefix(line, "line ") || line == "partial\n" || line == "e\n" {
				lines = append(lines, line)
			}
		}
		require.Equal(t, 150000, xs)
		require.Len(t, lines, 202)
		for i := range 200 {
			require.Equal(t, fmt.Sprintf("line %d\n", i), lines[i])
		}
		b, err := os.ReadFile(filepath.Join(dir, "test", fmt.Sprintf("rank-%d.out", r)))
		require.NoError(t, err)
		require.True(t, strings.HasSuffix(string(b), "x\npartial"))
		b, err = os.ReadFile(filepath.Join(dir, "test", fmt.Sprintf("rank-%d.err", r)))
		require.NoError(t, err)
		require.Equal(t, "e", string(b))
	}
}

func TestRunSideBySide(t *testing.T) {
	t.Parallel()
	a, b := start(t, workers(2, "shutdown")), start(t, workers(2, "shutdown"))
	for _, l := range []*launched{a, b} {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
}

func TestRunMistakes(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, []byte("x"), 0o644))
	orphan := filepath.Join(t.TempDir(), "orphan")
	require.NoError(t, os.WriteFile(orphan, []byte("#! /nowhere/python -u\nx"), 0o755))
	unbound := shell(1, "true")
	unbound.Bind = "192.0.2.1"
	negative := shell(1, "true")
	negative.Grace = -5 * time.Second
	many := shell(5, "true")
	many.Devices.Count = 2
	for _, tc := range []struct {
		cfg  *setup
		code int
		text string
	}{
		{base(1), ExitUsage, "no program"},
		{base(1, "/nowhere/at/all"), ExitNotFound, "cannot find the program /nowhere/at/all"},
		{base(1, script), ExitNotRunnable, "no permission to execute it"},
		{base(1, filepath.Dir(script)), ExitNotRunnable, "cannot run " + filepath.Dir(script) + ": it is a directory"},
		{base(1, orphan), ExitNotRunnable, "start rank 0: " + orphan + ": the interpreter /nowhere/python of the script does not exist"},
		{unbound, ExitUsage, `bind to "192.0.2.1": `},
		{negative, ExitUsage, "the grace period is -5s: want more than 0 (--grace or CHORUS_GRACE)"},
		{many, ExitUsage, "5 processes on the 2 virtual devices"},
		{base(0, "true"), ExitUsage, "this host has no device"},
	} {
		code, text := launchAll(t, tc.cfg)
		require.Equal(t, tc.code, code, text)
		require.Contains(t, text, tc.text)
	}
}

// twoHosts returns two configs that meet on two loopback addresses.
func twoHosts(t *testing.T, a, b *setup) {
	t.Helper()
	port := testhost.Reserve(t)
	for i, c := range []*setup{a, b} {
		c.Job = "two-" + fmt.Sprint(port)
		c.Host = fmt.Sprintf("h%d", i)
		c.Nodes = 2
		c.Seeds = []string{fmt.Sprintf("127.0.0.1:%d", port)}
		c.Bind = fmt.Sprintf("127.0.0.%d:%d", i+1, port)
		c.Secret = []byte("sixteen bytes or more")
	}
}

func TestRunTwoHosts(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "shutdown"), workers(2, "shutdown")
	twoHosts(t, a, b)
	lb := start(t, b)
	la := start(t, a)
	for _, l := range []*launched{la, lb} {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	require.Contains(t, la.text(), "[rank 0] attached 0 of 3")
	require.Contains(t, lb.text(), "[rank 2] attached 2 of 3")
}

// Two launchers with one host name are two hosts. Each says once who the other one is.
func TestRunTwoHostsOfOneName(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "shutdown"), workers(1, "shutdown")
	twoHosts(t, a, b)
	b.Host = a.Host
	la, lb := start(t, a), start(t, b)
	for _, ls := range [][]*launched{{la, lb}, {lb, la}} {
		code, text := ls[0].wait()
		require.Zero(t, code, text)
		require.Equal(t, 1, strings.Count(text, "chorus: warning: several launchers of the job count as hosts, and all are named h0: "), text)
		require.Regexp(t, fmt.Sprintf(`: this one \(pid %d at 127\.0\.0\.[12]:\d+\) and pid %d at 127\.0\.0\.[12]:\d+; on one machine, their ranks would use the same GPUs\. `,
			ls[0].cmd.Process.Pid, ls[1].cmd.Process.Pid), text)
	}
}

func TestRunTwoHostsWorkerFails(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "2", "exit3"), workers(2, "2", "exit3")
	twoHosts(t, a, b)
	la, lb := start(t, a), start(t, b)
	codeA, textA := la.wait()
	codeB, textB := lb.wait()
	require.Equal(t, 3, codeA, textA)
	require.Equal(t, 3, codeB, textB)
	require.Contains(t, textA, "chorus: rank 2 (host h1, pid ")
	require.Contains(t, textA, "exited with code 3")
	require.Contains(t, textB, "; the other rank of this host ended with it\n")
}

func TestRunTwoHostsLauncherKilled(t *testing.T) {
	t.Parallel()
	for victim := range 2 {
		t.Run(fmt.Sprint("h", victim), func(t *testing.T) {
			t.Parallel()
			a, b := workers(1, "none"), workers(1, "none")
			twoHosts(t, a, b)
			ls := []*launched{start(t, a), start(t, b)}
			for _, l := range ls {
				l.until("attached", 1)
			}
			require.NoError(t, ls[victim].cmd.Process.Kill())
			code, text := ls[1-victim].wait()
			require.Equal(t, ExitFailed, code, text)
			require.Contains(t, text, fmt.Sprintf("chorus: host h%d (pid %d) ", victim, ls[victim].cmd.Process.Pid))
		})
	}
}

// TestRunTwoHostsPaused stops the launcher that coordinates for so long that the
// other host gives up. Both say that this was first.
func TestRunTwoHostsPaused(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "none").noticingSilence(), workers(1, "none").noticingSilence()
	twoHosts(t, a, b)
	la, lb := start(t, a), start(t, b)
	la.until("attached", 1)
	lb.until("attached", 1)
	require.NoError(t, la.cmd.Process.Signal(syscall.SIGSTOP))
	code, text := lb.wait()
	require.Equal(t, ExitFailed, code, text)
	require.Contains(t, text, fmt.Sprintf("chorus: host h0 (pid %d) was lost: its launcher, which coordinates the job, was silent for %v", la.cmd.Process.Pid, silentAfter))
	require.NoError(t, la.cmd.Process.Signal(syscall.SIGCONT))
	code, text = la.wait()
	require.Equal(t, ExitFailed, code, text)
	require.Contains(t, text, fmt.Sprintf("chorus: this launcher was silent for %v, so that ", silentAfter))
	require.Contains(t, text, " disconnected: stopped or starved")
}

// TestRunTwoHostsKilled: a second signal at one host ends the workers of both at once.
func TestRunTwoHostsKilled(t *testing.T) {
	t.Parallel()
	a, b := shell(1, `trap 'echo no' INT TERM; echo ready; while :; do sleep 0.05; done`), shell(1, "")
	twoHosts(t, a, b)
	b.Program = a.Program
	a.Grace, b.Grace = time.Hour, time.Hour
	ls := []*launched{start(t, a), start(t, b)}
	for _, l := range ls {
		l.until("ready", 1)
	}
	require.NoError(t, ls[1].cmd.Process.Signal(syscall.SIGINT))
	for _, l := range ls {
		l.until("] no", 1)
	}
	require.NoError(t, ls[1].cmd.Process.Signal(syscall.SIGINT))
	for _, l := range ls {
		code, text := l.wait()
		require.Equal(t, 128+2, code, text)
	}
}

// TestRunTwoHostsProgramMissing: a host without the program does not keep the other waiting.
func TestRunTwoHostsProgramMissing(t *testing.T) {
	t.Parallel()
	for _, first := range []int{0, 1} {
		t.Run(fmt.Sprint("first: ", first), func(t *testing.T) {
			t.Parallel()
			a, b := workers(1, "shutdown"), workers(1, "shutdown")
			twoHosts(t, a, b)
			a.Timing.Join, b.Timing.Join = time.Minute, time.Minute
			b.Program = []string{"/nonexistent/train"}
			cs, ls := []*setup{a, b}, make([]*launched, 2)
			ls[first] = start(t, cs[first])
			ls[1-first] = start(t, cs[1-first])
			code, text := ls[1].wait()
			require.Equal(t, ExitNotFound, code, text)
			require.Contains(t, text, "chorus: cannot find the program /nonexistent/train\n") // a line about the wait for the seed may come first
			code, text = ls[0].wait()
			require.Equal(t, ExitUsage, code, text)
			require.Contains(t, text, "host h1 cannot take part: cannot find the program /nonexistent/train")
		})
	}
}

// TestRunAbsent: a worker that never attaches is the cause, not those that wait for it.
func TestRunAbsent(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	cfg := shell(3, `[ $RANK = 1 ] && exec sleep 1000; exec `+self+` worker shutdown`)
	cfg.Timing.Join, cfg.Grace = 8*time.Second, time.Second
	code, text := launchAll(t, cfg)
	require.Equal(t, 41, code, text)
	require.Regexp(t, `chorus: rank 1 \(host h0\) never joined the job \(missing rank 1\), so rank [02] gave up and exited with code 41`, text)
}

// TestRunTwoWorkersStopped: when SIGSTOP has stopped all workers that are left, there is nothing to
// wait for.
func TestRunTwoWorkersStopped(t *testing.T) {
	t.Parallel()
	cfg := workers(2, "all", "stop when all have come").noticingSilence()
	cfg.Grace = time.Hour
	code, text := launchAll(t, cfg)
	require.NotZero(t, code, text)
	require.Contains(t, text, fmt.Sprintf("silent for %v", silentAfter))
}

func TestRunTwoHostsWrongSecretAndTimeout(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "shutdown"), workers(1, "shutdown")
	twoHosts(t, a, b)
	a.Timing.Join = 8 * time.Second // b comes within, however busy the machine is
	b.Secret, b.Timing.Join = []byte("quite another secret"), time.Minute
	la := start(t, a)
	begin := time.Now()
	lb := start(t, b)
	code, text := lb.wait()
	if code == ExitAuth { // it came when the seed was there
		require.Contains(t, text, "different secret")
		require.Less(t, time.Since(begin), b.Timing.Join/2)
	}
	require.Equal(t, ExitAuth, code, text)
	code, text = la.wait()
	require.Equal(t, ExitUnavailable, code, text)
	require.Contains(t, text, "1 of 2 hosts have joined: host h0 pid ")
}
