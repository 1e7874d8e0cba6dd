package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/testhost"
)

var splits = flag.Int("splits", 1, "how often TestNoJobRunsTwice makes each fault")

// beatVar has how long a worker needs to return after the end of an epoch. The test binary is then a worker that prints
// the epoch and its members while its function runs.
const beatVar = "ELASTIC_TEST_BEAT"

func beat(slow string) int {
	d, err := time.ParseDuration(slow)
	if err != nil {
		panic(err)
	}
	err = cluster.Run(context.Background(), nil, func(ctx context.Context, w *cluster.World) error {
		var hosts []string
		for _, m := range w.Members() {
			hosts = append(hosts, fmt.Sprintf("%s/%d", m.Host, m.PID))
		}
		for ctx.Err() == nil {
			fmt.Printf("works in epoch %d of %s, pid %d\n", w.Epoch(), strings.Join(hosts, " "), os.Getpid())
			if err := w.Step(); err != nil {
				time.Sleep(d) // the function returns slowly
				return err
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
		time.Sleep(d)
		return context.Cause(ctx)
	})
	fmt.Println("run:", err)
	if err != nil {
		return 1
	}
	return 0
}

var worksIn = regexp.MustCompile(`works in epoch (\d+) of (.*), pid (\d+)`)

// A bench is a job on the hosts of a network, whose launchers have the default time limits.
type bench struct {
	*testhost.LAN
	t     *testing.T
	cmds  []*exec.Cmd
	lines chan line
	text  strings.Builder

	worlds map[string]string      // the members of each epoch
	last   []string               // the epoch in which a host has worked last
	at     []time.Time            // when
	ended  []bool                 // launchers
	pids   map[int]map[string]int // of the workers by host and epoch
}

// newBench starts launchers. slow has the time that the functions of a host need to return.
func newBench(t *testing.T, hosts int, slow map[int]time.Duration) *bench {
	testhost.Timed(t)
	b := &bench{LAN: testhost.New(t, hosts), t: t, lines: make(chan line, 10000), worlds: map[string]string{}, last: make([]string, hosts),
		at: make([]time.Time, hosts), ended: make([]bool, hosts), pids: map[int]map[string]int{}}
	self, err := os.Executable()
	require.NoError(t, err)
	port := testhost.Reserve(t)
	var seeds []string
	for i := range hosts {
		seeds = append(seeds, fmt.Sprintf("%s:%d", b.IP(i), port))
	}
	for i := range hosts {
		b.pids[i] = map[string]int{}
		cmd := b.Command(i, self)
		at := launcherConfig{Job: "split", Host: fmt.Sprint("h", i), Bind: seeds[i], Nodes: hosts, Procs: 1, Seeds: seeds,
			Env: []string{beatVar + "=" + slow[i].String(), "CHORUS_BACKEND=virtual"}}
		cmd.Env = append(os.Environ(), at.variable())
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		cmd.Stderr = cmd.Stdout
		require.NoError(t, cmd.Start())
		b.cmds = append(b.cmds, cmd)
		go func() {
			for s := bufio.NewScanner(out); s.Scan(); {
				b.lines <- line{i, s.Text(), time.Now()}
			}
			_ = cmd.Wait() // the code follows
			b.lines <- line{i, fmt.Sprint("exit ", cmd.ProcessState.ExitCode()), time.Now()}
		}()
		t.Cleanup(func() { cmd.Process.Kill() })
	}
	return b
}

// read handles a line of output: an epoch has the same members wherever it runs.
func (b *bench) read(l line) {
	if m := worksIn.FindStringSubmatch(l.text); m != nil {
		epoch, members := m[1], m[2]
		if b.last[l.host] != epoch {
			fmt.Fprintf(&b.text, "%s h%d: %s\n", l.at.Format("05.000"), l.host, l.text)
		}
		if b.worlds[epoch] == "" {
			b.worlds[epoch] = members
		}
		require.Equal(b.t, b.worlds[epoch], members, "epoch %s runs twice:\n%s", epoch, &b.text)
		b.last[l.host], b.at[l.host], b.pids[l.host][epoch] = epoch, l.at, numbers(m[3:])[0]
		return
	}
	fmt.Fprintf(&b.text, "%s h%d: %s\n", l.at.Format("05.000"), l.host, l.text)
	if strings.HasPrefix(l.text, "exit ") {
		b.ended[l.host] = true
	}
}

// until reads until done, which has a limit.
func (b *bench) until(what string, limit time.Duration, done func() bool) {
	b.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for !done() {
		select {
		case l := <-b.lines:
			b.read(l)
		case <-timer.C:
			require.FailNow(b.t, "waits for "+what, "%s", &b.text)
		}
	}
}

// pause reads for a time.
func (b *bench) pause(d time.Duration) {
	end := time.Now().Add(d)
	for {
		select {
		case l := <-b.lines:
			b.read(l)
		case <-time.After(time.Until(end)):
			return
		}
	}
}

// work waits until all hosts but those of without work in one epoch.
func (b *bench) work(without ...int) {
	b.t.Helper()
	b.until("an epoch of all hosts", time.Minute, func() bool {
		epochs := map[string]int{}
		for i, e := range b.last {
			if !slices.Contains(without, i) {
				epochs[e]++
			}
		}
		for e, n := range epochs {
			return e != "" && len(epochs) == 1 && len(strings.Fields(b.worlds[e])) == n
		}
		return false
	})
}

// drop lets packets between two hosts vanish, and pass again.
func (b *bench) drop(i, j int) {
	b.Do("ip -n %s route add blackhole %s/32", b.NS(i), b.IP(j))
	b.Do("ip -n %s route add blackhole %s/32", b.NS(j), b.IP(i))
}

func (b *bench) pass(i, j int) {
	b.Do("ip -n %s route del blackhole %s/32", b.NS(i), b.IP(j))
	b.Do("ip -n %s route del blackhole %s/32", b.NS(j), b.IP(i))
}

func (b *bench) dropAll(these, those []int) {
	for _, i := range these {
		for _, j := range those {
			b.drop(i, j)
		}
	}
}

// settled waits until the hosts have had time for everything, and returns those that then work, all in one epoch. The
// launchers of the others that are not drained have ended, or wait for the job.
func (b *bench) settled() []int {
	b.pause(12 * time.Second)
	begun := time.Now()
	b.pause(2 * time.Second)
	epochs := map[string]bool{}
	var works []int
	for i, at := range b.at {
		if at.After(begun) {
			epochs[b.last[i]] = true
			works = append(works, i)
		}
	}
	require.LessOrEqual(b.t, len(epochs), 1, "epochs %v run at the same time:\n%s", slices.Sorted(maps.Keys(epochs)), &b.text)
	return works
}

// TestNoJobRunsTwice injects the faults that once let two parts of a job go on: at each moment at most one part works,
// no epoch has two worlds, and a majority goes on.
func TestNoJobRunsTwice(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	around := func(d time.Duration) time.Duration { return d*3/4 + time.Duration(rnd.Int64N(int64(d/2))) }
	for _, fault := range []struct {
		name string
		run  func(t *testing.T) (works, want []int)
	}{
		{"a host without workers, and a cut in two steps", func(t *testing.T) ([]int, []int) {
			b := newBench(t, 3, nil)
			b.work()
			require.NoError(t, syscall.Kill(b.pids[2][b.last[2]], syscall.SIGKILL)) // no restart is left
			b.work(2)
			b.drop(0, 1)
			b.pause(around(300 * time.Millisecond))
			b.drop(0, 2)
			return b.settled(), []int{1}
		}},
		{"drained hosts and a cut", func(t *testing.T) ([]int, []int) {
			b := newBench(t, 5, map[int]time.Duration{0: 2 * time.Second, 1: 2 * time.Second})
			b.work()
			for _, i := range []int{3, 4} {
				require.NoError(t, b.cmds[i].Process.Signal(syscall.SIGTERM))
			}
			b.pause(around(700 * time.Millisecond))
			b.dropAll([]int{0, 1}, []int{2, 3, 4})
			works := b.settled()
			require.NotContains(t, works, 0, &b.text)
			require.NotContains(t, works, 1, &b.text)
			return works, works
		}},
		{"reset connections and lost packets", func(t *testing.T) ([]int, []int) {
			b := newBench(t, 3, nil)
			b.work()
			for _, j := range []int{1, 2} {
				b.Do("ip -n %s route add blackhole %s/32", b.NS(0), b.IP(j)) // so that nobody connects again
				b.Do("ip netns exec %s ss -K dst %s", b.NS(j), b.IP(0))      // the coordinator gets the reset
				b.Do("ip -n %s route add blackhole %s/32", b.NS(j), b.IP(0))
			}
			return b.settled(), []int{1, 2}
		}},
		{"a coordinator that was replaced", func(t *testing.T) ([]int, []int) {
			b := newBench(t, 4, map[int]time.Duration{0: 8 * time.Second})
			b.work()
			b.dropAll([]int{0}, []int{1, 2, 3})
			b.until("another coordinator", time.Minute, func() bool { return strings.Contains(b.text.String(), "h1 coordinates the job now") })
			b.pause(time.Duration(rnd.Int64N(int64(100 * time.Millisecond))))
			b.drop(1, 2)
			b.pass(0, 2)
			works := b.settled()
			require.NotContains(t, works, 0, &b.text)
			return works, works
		}},
	} {
		t.Run(fault.name, func(t *testing.T) {
			for range *splits {
				works, want := fault.run(t)
				require.Equal(t, want, works)
				t.Logf("hosts %v go on", works)
			}
		})
	}
}
