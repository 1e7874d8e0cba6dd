package job

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// Only the kernel of a host, or another process of the job at its address, proves that a process has ended.
func TestProofOfAnEnd(t *testing.T) {
	refused := func(ip string) error {
		return fmt.Errorf("dial: %w", &net.OpError{Op: "dial", Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}, Err: syscall.ECONNREFUSED})
	}
	for name, tc := range map[string]struct {
		err      error
		addr, ip string
		proves   bool
	}{
		"its host refuses":                        {refused("10.0.0.1"), "10.0.0.1:1", "10.0.0.1", true},
		"its name leads to it":                    {refused("10.0.0.1"), "n1:1", "10.0.0.1", true},
		"its name leads to another host":          {refused("10.0.0.2"), "n1:1", "10.0.0.1", false},
		"another process there":                   {errReplaced{"10.0.0.1"}, "10.0.0.1:1", "10.0.0.1", true},
		"another process where its name leads":    {errReplaced{"10.0.0.2"}, "n1:1", "10.0.0.1", false},
		"an address of IPv4 as one of IPv6":       {refused("::ffff:10.0.0.1"), "10.0.0.1:1", "10.0.0.1", true},
		"a socket of this host":                   {syscall.ECONNREFUSED, "@job", "", true},
		"reset":                                   {syscall.ECONNRESET, "10.0.0.1:1", "10.0.0.1", false},
		"closed":                                  {io.EOF, "10.0.0.1:1", "10.0.0.1", false},
		"silence":                                 {context.DeadlineExceeded, "10.0.0.1:1", "10.0.0.1", false},
		"no way to the host":                      {syscall.EHOSTUNREACH, "10.0.0.1:1", "10.0.0.1", false},
		"a stranger, who proves nothing":          {&AuthError{Reason: errOtherJob.Error()}, "10.0.0.1:1", "10.0.0.1", false},
		"the same name, whose address is unknown": {syscall.ECONNREFUSED, "n1:1", "10.0.0.1", false},
	} {
		require.Equal(t, tc.proves, provesEnd(tc.err, tc.addr, tc.ip), name)
	}
}

// A launcher that is connected is found alive, and ended when it has closed its port, which another launcher may take.
func TestProbe(t *testing.T) {
	cfgs := onLoopback(t, 3, 1)
	for _, c := range cfgs {
		c.NoGossip = true
	}
	as, errs := startAll(t, cfgs...)
	require.NoError(t, errors.Join(errs...))
	a, h := as[0], as[1].Now.Load().Place.Load().plan.Hosts[1]
	require.Equal(t, as[1].UUID, h.UUID)
	require.Equal(t, foundAlive, a.probe(t.Context(), h, ""))
	own := a.Now.Load().Place.Load().plan.Hosts[0]
	require.Equal(t, foundAlive, a.probe(t.Context(), own, ""), "it coordinates")
	own.UUID = "another"
	require.Equal(t, foundEnded, a.probe(t.Context(), own, ""), "another process is there")
	h.UUID = "another"
	require.Equal(t, foundEnded, a.probe(t.Context(), h, ""))
	h.UUID = as[1].UUID
	ip, port, _ := net.SplitHostPort(h.Control)
	h.Control = net.JoinHostPort("localhost", port)
	as[1].Close()
	require.Equal(t, foundNothing, a.probe(t.Context(), h, "192.0.2.1"), "the name leads to another host")
	h.Control = net.JoinHostPort(ip, port)
	require.Equal(t, foundEnded, a.probe(t.Context(), h, "192.0.2.1"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, foundNothing, a.probe(ctx, h, ip))
}

// A connection that ends counts as the end of the launcher only if a probe proves it, soon after it has heard from the coordinator.
func TestEndOfAConnectionIsNoProof(t *testing.T) {
	for found, counts := range map[finding]bool{foundNothing: false, foundAlive: false, foundEnded: true} {
		for _, late := range []bool{false, true} {
			testhost.Bubble(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c")
				s, of := j.served()
				s.cfg.probes = true
				s.cfg.probe = func(_ context.Context, h host, ip string) finding {
					require.Equal(t, []string{"c", "10.0.0.3"}, []string{h.UUID, ip})
					return found
				}
				c := j.hosts["c"]
				c.addr = "10.0.0.3:41000"
				of(c).heardBeat(Message{Body: make([]byte, 8)})
				require.False(t, s.mustProve(of(c), context.DeadlineExceeded), "silence ends its part in the job")
				require.False(t, s.mustProve(of(j.procs["c"]), io.EOF), "a worker")
				for _, err := range []error{syscall.ECONNRESET, io.EOF} {
					require.True(t, s.mustProve(of(c), err))
				}
				if late {
					time.Sleep(j.cfg.Self.LostAfter)
				}
				require.Equal(t, found, s.examine(of(c)))
				s.disconnects(of(c), io.EOF)
				require.Equal(t, counts && !late, j.ended["c"])
				synctest.Wait()
			})
		}
	}
}

// Each end of a stream knows until when the other one has heard it, also if packets are lost in one direction.
func TestHeartbeatsShowWhoIsHeard(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		a, b := NewStream(nil, NewRunClock(time.Second), time.Minute), NewStream(nil, NewRunClock(time.Second), time.Minute)
		beat := func(from, to *stream) {
			from.link = &Link{}
			from.SendBeat()
			_, f, _ := from.nextFrame()
			m, err := DecodeMessage(f.Body)
			require.NoError(t, err)
			require.Equal(t, kindBeat, m.Kind)
			if to != nil {
				to.heardBeat(m)
			}
		}
		const limit = 3 * time.Second
		for range 10 {
			time.Sleep(time.Second)
			beat(a, b)
			beat(b, a)
		}
		require.True(t, a.isCertain(time.Nanosecond), "b has answered at once")
		require.True(t, b.isCertain(time.Second+time.Nanosecond), "a has heard the last answer")
		require.False(t, b.isCertain(time.Second))
		for range 3 {
			time.Sleep(time.Second)
			beat(a, nil)
			beat(b, a)
		}
		require.False(t, a.isCertain(limit), "b has heard nothing since")
		require.True(t, a.isCertain(limit+time.Nanosecond))
		a.heardBeat(Message{ID: 1, Body: binary.BigEndian.AppendUint64(nil, math.MaxUint64)}) // nonsense
		require.False(t, a.isCertain(limit))
	})
}
