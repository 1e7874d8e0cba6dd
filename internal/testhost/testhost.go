// Package testhost tells tests about the host they run on: whether the race detector watches
// them, and which ports are free. It also makes networks of hosts, which are network namespaces
// on a bridge of this machine.
package testhost

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
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
