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
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var outages = flag.Int("outages", 2, "how many outages TestOutageBetweenHosts makes")

// A lan is a network of hosts, each a network namespace with an interface eth0 on a bridge.
type lan struct {
	t    *testing.T
	id   string
	size int
}

var lans atomic.Int32

// newLAN returns a network of n hosts. It needs root.
func newLAN(t *testing.T, n int) *lan {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can create network namespaces")
	}
	for _, program := range []string{"ip", "bridge"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	l := &lan{t: t, id: fmt.Sprintf("ch%x-%d", os.Getpid(), lans.Add(1)), size: n}
	t.Cleanup(l.close)
	l.do("ip link add %s type bridge", l.id)
	l.do("ip link set %s up", l.id)
	for i := range n {
		l.do("ip netns add %s", l.ns(i))
		l.do("ip link add %s type veth peer name eth0 netns %s", l.port(i), l.ns(i))
		l.do("ip link set %s master %s up", l.port(i), l.id)
		l.do("ip -n %s addr add %s/24 dev eth0", l.ns(i), l.ip(i))
		l.do("ip -n %s link set eth0 up", l.ns(i))
		l.do("ip -n %s link set lo up", l.ns(i))
	}
	return l
}

func (l *lan) ns(i int) string   { return fmt.Sprintf("%s-%d", l.id, i) }
func (l *lan) port(i int) string { return fmt.Sprintf("%sv%d", l.id, i) }
func (l *lan) ip(i int) string   { return fmt.Sprintf("10.77.0.%d", i+1) }

func (l *lan) do(format string, args ...any) {
	l.t.Helper()
	words := strings.Fields(fmt.Sprintf(format, args...))
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
	require.NoError(l.t, err, "%v: %s", words, out)
}

func (l *lan) close() {
	for i := range l.size {
		_ = exec.Command("ip", "netns", "del", l.ns(i)).Run() // may not exist after a failure
	}
	_ = exec.Command("ip", "link", "del", l.id).Run()
}

// cut lets the switch drop all packets to and from host i. (If the host itself drops them, its
// TCP knows, and does not wait longer and longer.)
func (l *lan) cut(i int) { l.do("bridge link set dev %s state 0", l.port(i)) }

// heal ends cut.
func (l *lan) heal(i int) { l.do("bridge link set dev %s state 3", l.port(i)) }

// A process is a program on a host of a lan.
type process struct {
	cmd   *exec.Cmd
	lines chan string // of its output; closed at its end
}

// start runs the test binary on host i.
func (l *lan) start(i int, vars []string, args ...string) *process {
	l.t.Helper()
	self, err := os.Executable()
	require.NoError(l.t, err)
	p := &process{cmd: exec.Command("ip", append([]string{"netns", "exec", l.ns(i), self}, args...)...), lines: make(chan string, 1000)}
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
	dir := filepath.Join("/etc/netns", l.ns(i)) // ip netns exec mounts its files over those of /etc
	require.NoError(l.t, os.MkdirAll(dir, 0o755))
	l.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(l.t, os.WriteFile(filepath.Join(dir, "hosts"), []byte(hosts), 0o644))
}

// nodesVar has the number of hosts for agentMain. With waitVar it ends only with the job.
const nodesVar, waitVar = "CLUSTER_TEST_NODES", "CLUSTER_TEST_WAIT"

// agentMain is a launcher without workers.
func agentMain(host, seed string) int {
	nodes, _ := strconv.Atoi(os.Getenv(nodesVar))
	a, err := Start(context.Background(), &Config{Job: "lan", Nodes: nodes, Host: host, Seeds: []string{seed}, Insecure: true, Timing: quick})
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
	for deadline := time.Now().Add(10 * time.Second); len(a.gossip.ml.Members()) < nodes && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println("gossip sees", len(a.gossip.ml.Members()))
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
		time.Sleep(time.Second) // so that every path was probed
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
	l.resolves(1, "127.0.0.1 localhost\n127.0.1.1 beta\n"+l.ip(0)+" alpha\n")
	env := []string{"CHORUS_HOST=alpha", nodesVar + "=2"}
	t.Run("launchers", func(t *testing.T) {
		ps := []*process{l.start(0, env, "agent", "alpha", "alpha"), l.start(1, env[1:], "agent", "beta", "alpha")}
		for _, p := range ps {
			code, text := p.exit()
			require.Zero(t, code, text)
			require.Contains(t, text, "MASTER_ADDR="+l.ip(0))
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
	for name, test := range map[string]struct {
		harm  func(l *lan)
		cause string // a regular expression
		hosts []int  // those that can learn it
	}{
		"pair": {func(l *lan) {
			l.do("bridge link set dev %s isolated on", l.port(1))
			l.do("bridge link set dev %s isolated on", l.port(2))
		}, `host n([12]) \(pid \d+\) lost: host n([12]) pid \d+ cannot connect to it; both reach the coordinator`, []int{0, 1, 2, 3}},
		"packets of full size": {func(l *lan) { l.do("ip link set %s mtu 1300", l.port(2)) },
			`host n([0123]) \(pid \d+\) lost: host n([0123]) pid \d+ can connect to it, but packets of full size do not arrive: the MTU`, []int{0, 1, 2, 3}},
		"coordinator": {func(l *lan) { l.cut(0) },
			`host n0 \(pid \d+\) lost: cut off from the other hosts: it coordinates the job and has heard none of them for `, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t, 4)
			ps := make([]*process, 4)
			for i := range ps {
				// Large packets would pass the bridge before they are cut into packets.
				l.do("ip -n %s link set eth0 gso_max_segs 1", l.ns(i))
				ps[i] = l.start(i, []string{nodesVar + "=4", waitVar + "=yes"}, "agent", fmt.Sprint("n", i), l.ip(0))
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

// TestOutageBetweenHosts cuts a host off from the coordinator for 80 % of the default time limit.
// After that TCP would wait for longer than the limit until it tries again.
func TestOutageBetweenHosts(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 2)
	vars := func(rank int) []string {
		return []string{fmt.Sprint("RANK=", rank), "WORLD_SIZE=3", "MASTER_ADDR=" + l.ip(0), "MASTER_PORT=29500", "CHORUS_INSECURE=yes"}
	}
	ps := []*process{l.start(0, vars(0), "worker", "count"), l.start(1, vars(1), "worker", "count"), l.start(1, vars(2), "worker", "count")}
	for _, p := range ps {
		p.await(t, "counting")
	}
	for range *outages {
		begun := time.Now()
		l.cut(1)
		took := time.Since(begun) // heal takes about as long
		time.Sleep(2400*time.Millisecond - 2*took)
		l.heal(1)
		time.Sleep(3500 * time.Millisecond)
	}
	require.NoError(t, ps[0].cmd.Process.Signal(syscall.SIGUSR1))
	for i, p := range ps {
		code, text := p.exit()
		require.Zero(t, code, "rank %d:\n%s", i, text)
	}
}
