package cluster

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/testhost"
)

var outages = flag.Int("outages", 1, "how many outages TestOutageBetweenHosts makes")

// A process is a program on a host of a lan.
type process struct {
	cmd   *exec.Cmd
	lines chan string // of its output; closed at its end
}

// A lan is a network on whose hosts the test binary runs.
type lan struct {
	*testhost.LAN
	t *testing.T
}

// lans limits the networks that exist at the same time: each has several processes with time limits of seconds.
var lans = make(chan struct{}, max(2, runtime.NumCPU()/2))

func newLAN(t *testing.T, n int) *lan {
	testhost.Timed(t)
	lans <- struct{}{}
	t.Cleanup(func() { <-lans })
	return &lan{testhost.New(t, n), t}
}

// start runs the test binary on host i.
func (l *lan) start(i int, vars []string, args ...string) *process {
	l.t.Helper()
	self, err := os.Executable()
	require.NoError(l.t, err)
	p := &process{cmd: l.Command(i, self, args...), lines: make(chan string, 1000)}
	p.cmd.Env = append(os.Environ(), vars...)
	r, w := io.Pipe()
	p.cmd.Stdout, p.cmd.Stderr = w, w
	require.NoError(l.t, p.cmd.Start())
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
	}()
	ended := make(chan struct{})
	go func() { _ = p.cmd.Wait(); w.Close(); close(ended) }()
	l.t.Cleanup(func() { p.cmd.Process.Kill(); <-ended })
	return p
}

// await reads the output up to a line that contains text, and returns what it has read.
func (p *process) await(t *testing.T, text string) string {
	t.Helper()
	var read strings.Builder
	for {
		select {
		case line, ok := <-p.lines:
			require.True(t, ok, "ended without %q:\n%s", text, read.String())
			read.WriteString(line + "\n")
			if strings.Contains(line, text) {
				return read.String()
			}
		case <-time.After(time.Minute):
			require.FailNow(t, "waits for output", "%q after\n%s", text, read.String())
		}
	}
}

// exit waits for the end of the process, and returns its exit code and output.
func (p *process) exit() (int, string) {
	var read strings.Builder
	for line := range p.lines {
		read.WriteString(line + "\n")
	}
	return p.cmd.ProcessState.ExitCode(), read.String()
}

// resolves makes host i resolve names as in /etc/hosts.
func (l *lan) resolves(i int, hosts string) {
	l.t.Helper()
	dir := filepath.Join("/etc/netns", l.NS(i)) // ip netns exec mounts its files over those of /etc
	require.NoError(l.t, os.MkdirAll(dir, 0o755))
	l.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(l.t, os.WriteFile(filepath.Join(dir, "hosts"), []byte(hosts), 0o644))
}

// nodesVar has the number of hosts for agentMain. With waitVar it ends only with the job. If that is "blind", gossip is
// not expected to see the other hosts.
const nodesVar, waitVar = "CLUSTER_TEST_NODES", "CLUSTER_TEST_WAIT"

// lanTiming is the Timing of agentMain.
var lanTiming = Timing{Join: quick.Join, Call: quick.Call, Heartbeat: quick.Heartbeat, LostAfter: 3 * time.Second}

// agentMain is a launcher without workers.
func agentMain(host, seed string) int {
	nodes, _ := strconv.Atoi(os.Getenv(nodesVar))
	a, err := job.Start(context.Background(), &job.Config{Job: "lan", Nodes: nodes, Host: host, Seeds: []string{seed}, Insecure: true, Timing: lanTiming})
	if err != nil {
		fmt.Println("start:", err)
		return 41
	}
	defer a.Close()
	for _, v := range a.WorkerEnv(0) {
		if strings.HasPrefix(v, "MASTER_ADDR=") {
			fmt.Println(v)
		}
	}
	for deadline := time.Now().Add(90 * time.Second); a.Gossip != nil && os.Getenv(waitVar) != "blind" && len(a.Gossip.ML.Members()) < nodes && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if a.Gossip != nil {
		fmt.Println("gossip sees", len(a.Gossip.ML.Members()))
	}
	if os.Getenv(waitVar) != "" {
		for _, v := range a.WorkerEnv(0) {
			name, value, _ := strings.Cut(v, "=")
			os.Setenv(name, value)
		}
		s, err := Attach(context.Background())
		if err != nil {
			fmt.Println("attach:", err)
			return 43
		}
		defer s.Close()
		time.Sleep(lanTiming.LostAfter + time.Second) // so that every path was probed, and a silent host would be lost
		fmt.Println("waiting")
		<-a.Context().Done()
		fmt.Println("cause:", context.Cause(a.Context()))
		return 0
	}
	if err := a.Shutdown(context.Background()); err != nil {
		fmt.Println("shut down:", err)
		return 42
	}
	return 0
}

// TestSeedWithItsOwnName: a host resolves its own name to 127.0.1.1, as Debian does, and other
// hosts reach it by that name.
func TestSeedWithItsOwnName(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 2)
	l.resolves(0, "127.0.0.1 localhost\n127.0.1.1 alpha.example alpha\n")
	l.resolves(1, "127.0.0.1 localhost\n127.0.1.1 beta\n"+l.IP(0)+" alpha\n")
	env := []string{"CHORUS_HOST=alpha", nodesVar + "=2"}
	t.Run("launchers", func(t *testing.T) {
		ps := []*process{l.start(0, env, "agent", "alpha", "alpha"), l.start(1, env[1:], "agent", "beta", "alpha")}
		for _, p := range ps {
			code, text := p.exit()
			require.Zero(t, code, text)
			require.Contains(t, text, "MASTER_ADDR="+l.IP(0))
			require.Contains(t, text, "gossip sees 2")
		}
	})
	t.Run("torchrun", func(t *testing.T) {
		vars := []string{"WORLD_SIZE=2", "MASTER_ADDR=alpha", "MASTER_PORT=29501", "CHORUS_INSECURE=yes"}
		ps := []*process{l.start(0, append(vars, "RANK=0", env[0]), "worker", "close"), l.start(1, append(vars, "RANK=1"), "worker", "close")}
		for _, p := range ps {
			code, text := p.exit()
			require.Zero(t, code, text)
		}
	})
	t.Run("localhost", func(t *testing.T) {
		code, text := l.start(1, env[1:], "agent", "beta", "localhost").exit()
		require.Equal(t, 41, code)
		require.Contains(t, text, "seed localhost: on this host the name means the loopback, which other hosts cannot reach")
	})
}

// TestPathsBetweenHosts breaks a part of the network of a job on four hosts, and each host learns which
// part.
func TestPathsBetweenHosts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		harm  func(l *lan)
		cause string // a regular expression
		hosts []int  // those that can learn it
	}{
		"pair": {func(l *lan) {
			l.Do("bridge link set dev %s isolated on", l.Port(1))
			l.Do("bridge link set dev %s isolated on", l.Port(2))
		}, `host n([12]) \(pid \d+\) lost: host n([12]) pid \d+ cannot connect to it; both reach the coordinator`, []int{0, 1, 2, 3}},
		"packets of full size": {func(l *lan) { l.Do("ip link set %s mtu 1300", l.Port(2)) },
			`host n([0123]) \(pid \d+\) lost: host n([0123]) pid \d+ can connect to it, but packets of full size do not arrive: the MTU`, []int{0, 1, 2, 3}},
		"coordinator": {func(l *lan) { l.Cut(0) },
			`host n0 \(pid \d+\) lost: cut off from the other hosts: it coordinates the job and has heard none of them for `, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t, 4)
			ps := make([]*process, 4)
			for i := range ps {
				// Large packets would pass the bridge before they are cut into packets.
				l.Do("ip -n %s link set eth0 gso_max_segs 1", l.NS(i))
				ps[i] = l.start(i, []string{nodesVar + "=4", waitVar + "=yes"}, "agent", fmt.Sprint("n", i), l.IP(0))
			}
			for _, p := range ps {
				p.await(t, "waiting")
			}
			test.harm(l)
			for _, i := range test.hosts {
				require.Regexp(t, test.cause, ps[i].await(t, "cause:"))
			}
		})
	}
}

// TestOutageBetweenHosts cuts a host off from the coordinator for 7.5 s of a time limit of 12 s, so that a stall of the
// test does not exceed the limit. TCP repeats a packet 6.2 s after the cut, and then only after the limit.
func TestOutageBetweenHosts(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 2)
	vars := func(rank int) []string {
		return []string{fmt.Sprint("RANK=", rank), "WORLD_SIZE=3", "MASTER_ADDR=" + l.IP(0), "MASTER_PORT=29500", "CHORUS_INSECURE=yes", "CHORUS_LOST_AFTER=12s"}
	}
	ps := []*process{l.start(0, vars(0), "worker", "count"), l.start(1, vars(1), "worker", "count"), l.start(1, vars(2), "worker", "count")}
	for _, p := range ps {
		p.await(t, "counting")
	}
	for range *outages {
		begun := time.Now()
		l.Cut(1)
		took := time.Since(begun) // heal takes about as long
		time.Sleep(7500*time.Millisecond - 2*took)
		l.Heal(1)
		time.Sleep(5 * time.Second) // a loss would be noticed
	}
	require.NoError(t, ps[0].cmd.Process.Signal(syscall.SIGUSR1))
	for i, p := range ps {
		code, text := p.exit()
		require.Zero(t, code, "rank %d:\n%s", i, text)
	}
}

// TestWithoutUDP runs a job on hosts whose firewalls drop UDP packets. Nothing is lost until a host is cut off, which the
// others learn as usual.
func TestWithoutUDP(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 3)
	ps := make([]*process, 3)
	for i := range ps {
		l.Do("ip -n %s rule add pref 2 lookup local", l.NS(i))
		l.Do("ip -n %s rule del pref 0", l.NS(i))
		l.Do("ip -n %s rule add pref 1 iif eth0 ipproto udp blackhole", l.NS(i))
		ps[i] = l.start(i, []string{nodesVar + "=3", waitVar + "=blind"}, "agent", fmt.Sprint("n", i), l.IP(0))
	}
	for _, p := range ps {
		require.NotContains(t, p.await(t, "waiting"), "lost")
	}
	l.Cut(2)
	for _, p := range ps[:2] {
		require.Regexp(t, `host n2,? .?pid \d+\) lost: silent for `, p.await(t, "cause:"))
	}
}

// TestIPv6Only is a job of two hosts without IPv4, with each form of the seed's address.
func TestIPv6Only(t *testing.T) {
	l := newLAN(t, 2)
	for i := range 2 {
		l.Do("ip -n %s addr flush dev eth0", l.NS(i))
		l.Do("ip -n %s addr del 127.0.0.1/8 dev lo", l.NS(i))
		l.Do("ip -n %s addr add fd00::%d/64 dev eth0 nodad", l.NS(i), i+1)
		l.Do("ip -n %s addr add fe80::%d/64 dev eth0 nodad", l.NS(i), i+1)
	}
	for _, tc := range []struct{ seed, addr string }{{"fd00::1", "fd00::1"}, {"[fd00::1]:7100", "fd00::1"}, {"fe80::1%eth0", "fe80::1%eth0"}} {
		vars := []string{nodesVar + "=2", waitVar + "=blind"} // gossip knows no zones
		a, b := l.start(0, vars, "agent", "a", tc.seed), l.start(1, vars, "agent", "b", tc.seed)
		for _, p := range []*process{a, b} {
			p.await(t, "MASTER_ADDR="+tc.addr)
		}
		for _, p := range []*process{a, b} {
			require.NoError(t, p.cmd.Process.Kill())
			p.exit()
		}
	}
	// A job on one host.
	p := l.start(0, []string{nodesVar + "=1", waitVar + "=alone"}, "agent", "a", "x")
	p.await(t, "waiting")
}
