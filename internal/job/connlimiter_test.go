package job

import (
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A silent is a connection that reports its end.
type silent struct {
	net.Conn
	from string
	open *atomic.Int64
}

func (s *silent) Close() error { s.open.Add(-1); return nil }

func (s *silent) SetDeadline(time.Time) error { return nil }

func (s *silent) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(s.from), Port: 7} }

// TestLimitOfUnauthenticatedPeers admits more connections than the limiter permits. The oldest one of the address that has most of
// them is closed, but not before this process had time to read its first message.
func TestLimitOfUnauthenticatedPeers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		g := newConnLimiter()
		var open atomic.Int64
		enter := func(from string) *limitedConn {
			open.Add(1)
			return g.enter(&silent{from: from, open: &open})
		}
		begin := time.Now()
		member := enter("10.0.0.2")
		first := enter("10.0.0.1")
		for range maxUnverified - 2 {
			enter("10.0.0.1")
		}
		require.Zero(t, time.Since(begin), "there is room")
		require.EqualValues(t, maxUnverified, open.Load())
		for range 3 * maxUnverified {
			enter("10.0.0.1")
			require.EqualValues(t, maxUnverified, open.Load())
		}
		require.LessOrEqual(t, time.Since(begin), 4*minConnectionTime)
		require.GreaterOrEqual(t, time.Since(begin), 3*minConnectionTime)
		require.False(t, first.advance(stageProof), "it was closed")
		require.True(t, member.said(make([]byte, HelloBytes)), "one of another address keeps its place")
		require.Equal(t, []int{maxUnverified - 1, 1, 0}, placesOf(g))
		first.leave() // as often as you like
		member.leave()
		require.Equal(t, []int{maxUnverified - 1, 0, 0}, placesOf(g))

		again := enter("2001:db8::1")
		require.False(t, again.said(make([]byte, HelloBytes)), "a first message is valid once")
		require.True(t, again.advance(stageGossip))
		for i := range 3 * maxGossipStreams {
			s := enter("2001:db8::" + string("0123456789abcdef"[i%16]))
			require.True(t, s.advance(stageGossip))
		}
		require.False(t, again.advance(stageGossip))
		require.Equal(t, maxGossipStreams, placesOf(g)[stageGossip])
		g.close()
		require.Equal(t, []int{0, 0, 0}, placesOf(g))
		require.Zero(t, open.Load()-1, "the member is not the limiter's any more")
		enter("10.0.0.3")
		require.EqualValues(t, 1, open.Load(), "closed at once")
	})
}

// A connection that leaves makes room at once.
func TestRoomForUnauthenticatedPeers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		g := newConnLimiter()
		var open atomic.Int64
		var in []*limitedConn
		for range maxUnverified {
			in = append(in, g.enter(&silent{from: "10.0.0.1", open: &open}))
		}
		begin, done := time.Now(), make(chan time.Time)
		time.Sleep(minConnectionTime / 2)
		go func() { g.enter(&silent{from: "10.0.0.1", open: &open}); done <- time.Now() }()
		synctest.Wait()
		in[7].leave() // a handshake ends
		require.Equal(t, minConnectionTime/2, (<-done).Sub(begin))
		require.True(t, in[0].advance(stageProof))
		g.close()
	})
}

func TestRecent(t *testing.T) {
	r := recent[int]{most: 10}
	var all []int
	for i := range 100 {
		require.True(t, r.isNew(i))
		all = append(all, i)
		for _, last := range all[max(0, len(all)-10):] {
			require.False(t, r.isNew(last))
		}
		require.LessOrEqual(t, len(r.now)+len(r.before), 20)
	}
	require.True(t, r.isNew(slices.Min(all)), "it is forgotten")
}
