// Package testhost tells tests about the host they run on: whether the race detector watches
// them, and which ports are free. It also makes networks of hosts, which are network namespaces
// on a bridge of this machine, and fakes NCCL's RAS service, which listens on each host.
package testhost

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// Rounds returns n if the race detector watches this test binary, or all. The detector slows
// a program down by ten and lets every sync.Pool drop objects at random, so tests that count
// allocations, or that draw many programs, do less.
func Rounds(n, all int) int {
	if On {
		return n
	}
	return all
}

// Serial skips a long test of one goroutine if the race detector watches it.
func Serial(t testing.TB) {
	t.Helper()
	skip(t, "the test runs in one goroutine")
}

// Timed skips a test of processes with time limits of seconds if the race detector watches it: it slows them down so
// much that a busy machine exceeds their limits.
func Timed(t testing.TB) {
	t.Helper()
	skip(t, "the test has time limits of seconds")
}

func skip(t testing.TB, why string) {
	t.Helper()
	if On {
		t.Skip(why + ": it runs without the race detector")
	}
}

// Systems give ports from 32768 to outgoing connections, so such a connection can take any port
// there between its reservation and its use.
const (
	first = 10000
	last  = 32766
)

// Reserve returns a port that no other test of this host gets until t ends. The port and the next
// one, which a seed needs for gossip, are free on the first loopback addresses.
func Reserve(t testing.TB) int {
	t.Helper()
	for range 10000 {
		port := first + 2*rand.IntN((last-first)/2)
		// The system removes an abstract socket when its process ends.
		mark, err := net.Listen("unix", "@chorus-test-port-"+strconv.Itoa(port))
		if err != nil {
			continue
		}
		if isFree(port) && isFree(port+1) {
			t.Cleanup(func() { mark.Close() })
			return port
		}
		mark.Close()
	}
	t.Fatalf("no two free ports from %d to %d", first, last)
	return 0
}

func isFree(port int) bool {
	// A process that this one starts has all sockets until it executes its program, also one that was closed meanwhile.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	for host := 1; host <= 4; host++ {
		at := fmt.Sprintf("127.0.0.%d:%d", host, port)
		l, err := net.Listen("tcp", at)
		if err != nil {
			return false
		}
		l.Close()
		p, err := net.ListenPacket("udp", at)
		if err != nil {
			return false
		}
		p.Close()
	}
	return true
}

// A LAN is a network of hosts, each a network namespace with an interface eth0 on a bridge. Hosts have the
// numbers from 0 on.
type LAN struct {
	t    testing.TB
	id   string
	size int
}

var count atomic.Int32

// Lacks returns why this process cannot make networks, or "".
func Lacks() string {
	if os.Geteuid() != 0 {
		return "only root can create network namespaces"
	}
	for _, program := range []string{"ip", "bridge", "tc"} {
		if _, err := exec.LookPath(program); err != nil {
			return err.Error()
		}
	}
	return ""
}

// New returns a network of n hosts, which the end of the test removes. It skips the test if Lacks returns a reason.
func New(t testing.TB, n int) *LAN {
	t.Helper()
	if why := Lacks(); why != "" {
		t.Skip(why)
	}
	l := &LAN{t: t, id: fmt.Sprintf("ch%x-%d", os.Getpid(), count.Add(1)), size: n}
	t.Cleanup(l.close)
	l.Do("ip link add %s type bridge", l.id)
	l.Do("ip link set %s up", l.id)
	for i := range n {
		l.Do("ip netns add %s", l.NS(i))
		l.Do("ip link add %s type veth peer name eth0 netns %s", l.Port(i), l.NS(i))
		l.Do("ip link set %s master %s up", l.Port(i), l.id)
		l.Do("ip -n %s addr add %s/24 dev eth0", l.NS(i), l.IP(i))
		l.Do("ip -n %s link set eth0 up", l.NS(i))
		l.Do("ip -n %s link set lo up", l.NS(i))
	}
	return l
}

// Size returns the number of hosts.
func (l *LAN) Size() int { return l.size }

// NS returns the name of the namespace of host i.
func (l *LAN) NS(i int) string { return fmt.Sprintf("%s-%d", l.id, i) }

// Port returns the interface of the bridge to which host i is connected.
func (l *LAN) Port(i int) string { return fmt.Sprintf("%sv%d", l.id, i) }

// IP returns the address of host i.
func (l *LAN) IP(i int) string { return fmt.Sprintf("10.77.0.%d", i+1) }

// Command returns a command that runs a program on host i.
func (l *LAN) Command(i int, program string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", l.NS(i), program}, args...)...)
}

// Do runs a command line on this machine. A failure ends the test.
func (l *LAN) Do(format string, args ...any) {
	l.t.Helper()
	words := strings.Fields(fmt.Sprintf(format, args...))
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		l.t.Fatalf("%v: %v: %s", words, err, out)
	}
}

func (l *LAN) close() {
	for i := range l.size {
		_ = exec.Command("ip", "netns", "del", l.NS(i)).Run() // may not exist after a failure
	}
	_ = exec.Command("ip", "link", "del", l.id).Run()
}

// Cut lets the switch drop all packets to and from host i. (If the host itself drops them, its
// TCP knows, and does not wait longer and longer.)
func (l *LAN) Cut(i int) { l.Do("bridge link set dev %s state 0", l.Port(i)) }

// Heal ends Cut.
func (l *LAN) Heal(i int) { l.Do("bridge link set dev %s state 3", l.Port(i)) }

// Lose lets what host from sends to host to go to nobody.
func (l *LAN) Lose(from, to int) {
	l.Do("ip -n %s neigh replace %s lladdr 02:00:00:00:00:99 dev eth0 nud permanent", l.NS(from), l.IP(to))
}

// Find ends Lose.
func (l *LAN) Find(from, to int) { l.Do("ip -n %s neigh del %s dev eth0", l.NS(from), l.IP(to)) }

// Split moves hosts to another switch.
func (l *LAN) Split(hosts ...int) {
	l.Do("ip link add %sb type bridge", l.id)
	l.t.Cleanup(func() { _ = exec.Command("ip", "link", "del", l.id+"b").Run() })
	l.Do("ip link set %sb up", l.id)
	for _, i := range hosts {
		l.Do("ip link set %s master %sb", l.Port(i), l.id)
	}
}

// Join ends Split.
func (l *LAN) Join(hosts ...int) {
	for _, i := range hosts {
		l.Do("ip link set %s master %s", l.Port(i), l.id)
	}
}
