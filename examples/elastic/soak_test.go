package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testhost"
)

var (
	soakTime  = flag.Duration("soak", time.Second, "time of TestSoak; from a minute on also with 8 processes on one host")
	soakEvery = flag.Duration("every", 5*time.Second, "mean time between two faults of TestSoak")
)

// untilVar names a file. The test binary is then a worker that trains until the file has the number of steps.
const untilVar = "ELASTIC_TEST_UNTIL"

func workUntil(file string) int {
	t := &trainer{pause: 20 * time.Millisecond, steps: func() int {
		b, err := os.ReadFile(file)
		if err != nil {
			return math.MaxInt // the training is not to end yet
		}
		n, _ := strconv.Atoi(string(b))
		return n
	}}
	if err := run(context.Background(), file+".json", t); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

var leads = regexp.MustCompile(`host h(\d+) coordinates the job now`)

// A soakHost is a launcher with its workers, which is started again whenever it ends.
type soakHost struct {
	number int
	cmd    *exec.Cmd
	up     bool
	end    time.Time     // when it has ended last
	code   int           // with which
	harmed string        // the last fault of this host since the launcher has started, or ""
	rss    map[int]int64 // of its processes when they were first measured, by pid
	last   []string      // lines of its output
}

// A soak trains on several hosts while faults happen.
type soak struct {
	t     *testing.T
	rnd   *rand.Rand
	lan   *testhost.LAN // nil: all hosts are on the loopback
	port  int
	procs int // workers of each host
	until string
	hosts []*soakHost
	lines chan line
	log   *os.File

	// From the output of the workers:
	epoch   int
	members map[int]map[int]int // pids of the epoch by host and rank
	size    int                 // of the epoch
	leader  int                 // the host that coordinates
	step    int
	moved   time.Time // when the training went on last
	sums    map[string]int
	faults  map[string]int
	grown   int64 // the most that a process has grown
}

func newSoak(t *testing.T, hosts, procs int) *soak {
	seed := uint64(time.Now().UnixNano())
	s := &soak{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), port: testhost.Reserve(t), procs: procs, lines: make(chan line, 10000),
		sums: map[string]int{}, faults: map[string]int{}, moved: time.Now()}
	if hosts > 1 && testhost.Lacks() == "" {
		s.lan = testhost.New(t, hosts)
	}
	dir := t.TempDir()
	s.until = filepath.Join(dir, "steps")
	var err error
	s.log, err = os.Create(filepath.Join(dir, "log"))
	require.NoError(t, err)
	t.Cleanup(func() { s.log.Close() })
	t.Logf("seed %d; hosts in network namespaces: %v", seed, s.lan != nil)
	for i := range hosts {
		s.hosts = append(s.hosts, &soakHost{number: i, rss: map[int]int64{}})
	}
	for _, h := range s.hosts {
		s.launch(h)
	}
	return s
}

// address returns the address of host i without its port.
func (s *soak) address(i int) string {
	if s.lan != nil {
		return s.lan.IP(i)
	}
	return fmt.Sprintf("127.0.0.%d", i+1)
}

func (s *soak) job() string { return "soak-" + fmt.Sprint(s.port) }

// launch starts the launcher of a host.
func (s *soak) launch(h *soakHost) {
	self, err := os.Executable()
	require.NoError(s.t, err)
	h.cmd = exec.Command(self)
	env := []string{asWorker + "=1", "CHORUS_BACKEND=virtual", fmt.Sprint("CHORUS_VIRTUAL_DEVICES=", s.procs), untilVar + "=" + s.until}
	if s.lan != nil {
		h.cmd = s.lan.Command(h.number, self)
		env = append(env, "CHORUS_VIRTUAL_NETWORK="+s.address(h.number))
	}
	var seeds []string
	for i := range s.hosts {
		seeds = append(seeds, fmt.Sprintf("%s:%d", s.address(i), s.port))
	}
	at := launcherConfig{Host: fmt.Sprint("h", h.number), Job: s.job(), Nodes: len(s.hosts), Procs: s.procs, Seeds: seeds, Restarts: 1 << 20,
		Bind: fmt.Sprintf("%s:%d", s.address(h.number), s.port), Env: env}
	if len(s.hosts) == 1 {
		at.Seeds, at.Bind = nil, ""
	}
	h.cmd.Env = append(os.Environ(), at.variable())
	out, err := h.cmd.StdoutPipe()
	require.NoError(s.t, err)
	h.cmd.Stderr = h.cmd.Stdout
	require.NoError(s.t, h.cmd.Start())
	h.up, h.harmed = true, ""
	cmd := h.cmd
	go func() {
		for r := bufio.NewScanner(out); r.Scan(); {
			s.lines <- line{h.number, r.Text(), time.Now()}
		}
		_ = cmd.Wait() // the code follows
		s.lines <- line{host: h.number, text: fmt.Sprint("exit ", cmd.ProcessState.ExitCode())}
	}()
	s.t.Cleanup(func() { cmd.Process.Kill() })
}

// read handles one line of output.
func (s *soak) read(l line) {
	text := fmt.Sprintf("%s h%d: %s", time.Now().Format("15:04:05.000"), l.host, l.text)
	fmt.Fprintln(s.log, text)
	last := &s.hosts[l.host].last
	*last = append((*last)[max(0, len(*last)-29):], text)
	switch m := goesOn.FindStringSubmatch(l.text); {
	case m != nil:
		n := numbers(m[1:])
		if n[0] > s.epoch {
			s.epoch, s.size, s.members = n[0], n[2], map[int]map[int]int{}
		}
		if n[0] == s.epoch {
			if s.members[l.host] == nil {
				s.members[l.host] = map[int]int{}
			}
			s.members[l.host][n[1]] = n[3]
		}
	case leads.MatchString(l.text):
		s.leader = numbers(leads.FindStringSubmatch(l.text)[1:])[0]
	case stepOf.MatchString(l.text):
		s.step, s.moved = numbers(stepOf.FindStringSubmatch(l.text)[1:])[0], time.Now()
	case sumOf.MatchString(l.text):
		s.sums[sumOf.FindStringSubmatch(l.text)[2]]++
	case strings.HasPrefix(l.text, "exit "):
		h := s.hosts[l.host]
		h.code, _ = strconv.Atoi(l.text[len("exit "):])
		h.up, h.end = false, time.Now()
		if h.harmed == "" && h.code != 0 {
			s.faults["unexpected end of a launcher"]++
			s.t.Logf("the launcher of host %d has ended with code %d without a fault of its host:\n%s", l.host, h.code, strings.Join(h.last, "\n"))
		}
	}
}

func (s *soak) note(format string, args ...any) { fmt.Fprintf(s.log, "--- "+format+"\n", args...) }

// watch reads the output until done returns true. A job in which nothing happens has failed.
func (s *soak) watch(done func() bool) {
	const hang = 3 * time.Minute
	for begun := time.Now(); !done(); {
		select {
		case l := <-s.lines:
			s.read(l)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Since(s.moved) > hang || time.Since(begun) > 10*hang {
			s.fail("the training does not go on")
		}
	}
}

// fail ends the test with the end of the log.
func (s *soak) fail(format string, args ...any) {
	s.t.Helper()
	b, _ := os.ReadFile(s.log.Name())
	require.FailNow(s.t, fmt.Sprintf(format, args...), "%s", b[max(0, len(b)-20000):])
}

// whole reports whether all workers of all hosts are members of the epoch and have said so.
func (s *soak) whole() bool {
	n := 0
	for _, m := range s.members {
		n += len(m)
	}
	return s.size == len(s.hosts)*s.procs && n == s.size
}

// upkeep starts launchers again that have ended.
func (s *soak) upkeep() {
	for _, h := range s.hosts {
		if !h.up && time.Since(h.end) > time.Second {
			s.launch(h)
		}
	}
}

func (s *soak) settle() {
	s.watch(func() bool { s.upkeep(); return s.whole() })
}

// finish lets the training end, and checks its result.
func (s *soak) finish() *result {
	steps := (s.step/training.Steps + 4) * training.Steps
	require.NoError(s.t, os.WriteFile(s.until+".new", fmt.Append(nil, steps), 0o644))
	require.NoError(s.t, os.Rename(s.until+".new", s.until))
	s.watch(func() bool { return !slices.ContainsFunc(s.hosts, func(h *soakHost) bool { return h.up }) })
	for _, h := range s.hosts {
		if h.code != 0 {
			s.fail("host %d has ended with code %d", h.number, h.code)
		}
	}
	if len(s.sums) != 1 || slices.Collect(maps.Values(s.sums))[0] != len(s.hosts)*s.procs {
		s.fail("the ranks have the parameters %v", s.sums)
	}
	b, err := os.ReadFile(s.until + ".json")
	require.NoError(s.t, err)
	var res result
	require.NoError(s.t, json.Unmarshal(b, &res))
	require.Len(s.t, res.Losses, steps)
	require.Equal(s.t, slices.Repeat([]int32{int32(steps / training.Steps)}, training.BatchRows*training.Steps), res.Used, "uses of each row")
	s.noOrphans()
	return &res
}

// processes returns the processes of the job.
func (s *soak) processes() []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range files {
		b, _ := os.ReadFile(f) // it may have ended
		pid, _ := strconv.Atoi(strings.Split(f, "/")[2])
		if strings.Contains(string(b), "CHORUS_JOB="+s.job()+"\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (s *soak) noOrphans() {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := s.processes()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			s.fail("processes %v are left", left)
		}
	}
}

// measure compares the memory of the processes with the first measurement.
func (s *soak) measure() {
	for _, h := range s.hosts {
		pids := slices.Collect(maps.Values(s.members[h.number]))
		for _, pid := range append(pids, h.cmd.Process.Pid) {
			now := rssOf(pid)
			if _, ok := h.rss[pid]; !ok {
				h.rss[pid] = now
			}
			s.grown = max(s.grown, now-h.rss[pid])
			if now > h.rss[pid]*3/2+64<<20 {
				s.fail("process %d of host %d has grown from %d to %d MiB", pid, h.number, h.rss[pid]>>20, now>>20)
			}
		}
	}
}

// rssOf returns the resident memory of a process, or 0 if it has ended.
func rssOf(pid int) int64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	words := strings.Fields(string(b))
	if len(words) < 2 {
		return 0
	}
	n, _ := strconv.ParseInt(words[1], 10, 64)
	return n * int64(os.Getpagesize())
}

// TestSoak trains while workers, launchers and the coordinator are killed and stopped, hosts are drained and, if the
// tests run as root, cables are cut. At the end all ranks have the same parameters, each row of the data was used once
// in each pass, no process is left, and no process has grown.
func TestSoak(t *testing.T) {
	t.Run("hosts", func(t *testing.T) {
		s := newSoak(t, 3, 2)
		s.run(faultsOfHosts)
		s.finish()
	})
	if *soakTime < time.Minute {
		return // TestTrainingSurvives kills workers on one host
	}
	t.Run("workers", func(t *testing.T) {
		s := newSoak(t, 1, 8)
		s.run(map[string]func(*soak){"kill a worker": (*soak).killWorker})
		requireUndisturbed(t, s.finish())
	})
}

// run injects faults for the time of the soak.
func (s *soak) run(faults map[string]func(*soak)) {
	s.settle()
	names := slices.Sorted(maps.Keys(faults))
	for begun := time.Now(); time.Since(begun) < *soakTime; {
		name := names[s.rnd.IntN(len(names))]
		s.note("%s", name)
		s.faults[name]++
		faults[name](s)
		pace := min(*soakEvery, *soakTime)
		next := time.Now().Add(pace/2 + time.Duration(s.rnd.Int64N(int64(pace))))
		s.watch(func() bool { s.upkeep(); return time.Now().After(next) })
		s.settle()
		s.measure()
	}
	s.t.Logf("%d epochs, %d steps, faults: %v; a process has grown by at most %d MiB", s.epoch, s.step, s.faults, s.grown>>20)
}

// requireUndisturbed compares the losses with those of one process that nothing disturbs.
func requireUndisturbed(t *testing.T, res *result) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "alone.json")
	code := launch.Run(t.Context(), &launch.Config{
		Program: []string{self, "-json", file, "-epochs", fmt.Sprint(len(res.Losses) / training.Steps)},
		Procs:   1,
		Devices: launch.Devices{Count: 1, Backend: "virtual", Env: []string{asWorker + "=1", "CHORUS_BACKEND=virtual"}},
		Cluster: job.Config{Job: "alone"},
		Stdout:  &strings.Builder{},
		Stderr:  os.Stderr,
	})
	require.Zero(t, code)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var want result
	require.NoError(t, json.Unmarshal(b, &want))
	most := 0.0
	for i, w := range want.Losses {
		most = max(most, math.Abs(float64(res.Losses[i]-w))/float64(w))
	}
	t.Logf("%d losses differ by at most %.4f %% from those of an undisturbed run", len(want.Losses), 100*most)
	require.Less(t, most, 0.02)
}
