package nccl

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// TestHostileClaims gives what a peer may send in place of an operation.
func TestHostileClaims(t *testing.T) {
	good := claim{Magic: claimMagic, Differ: -1, First: signature{Kind: kindSend, Root: 1}}
	require.True(t, good.valid(2))
	for name, spoil := range map[string]func(*claim){
		"magic":      func(c *claim) { c.Magic++ },
		"kind":       func(c *claim) { c.First.Kind = 200 },
		"other kind": func(c *claim) { c.Other.Kind = 200 },
		"reduction":  func(c *claim) { c.First.Op = -1 },
		"root":       func(c *claim) { c.Other.Root = 2 },
		"lowest":     func(c *claim) { c.Lowest = -1 },
		"differ":     func(c *claim) { c.Differ = 2 },
	} {
		bad := good
		spoil(&bad)
		require.False(t, bad.valid(2), name)
	}
	require.NotEmpty(t, redopName(-1))
	require.Error(t, (&verdict{Rank: 1, Members: []member{{}}}).check())
	require.Error(t, (&verdict{Rank: 0}).check())
	require.NoError(t, (&verdict{Rank: -1}).check())
	require.NoError(t, (&verdict{Rank: 5, Result: ncclapi.InvalidUsage}).check())
}

func FuzzClaim(f *testing.F) {
	b, err := binary.Append(nil, binary.LittleEndian, &claim{Magic: claimMagic, Differ: -1})
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		a, c := &claim{Magic: claimMagic, Differ: -1}, new(claim)
		if _, err := binary.Decode(b, binary.LittleEndian, c); err != nil || !c.valid(4) {
			return
		}
		a.merge(c)
		require.NotEmpty(t, a.First.String()+a.Other.String())
		require.Less(t, a.Differ, int32(4))
	})
}

func FuzzHello(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, c := net.Pipe()
		go func() {
			_, _ = a.Write(b)
			a.Close()
		}()
		defer c.Close()
		var h hello
		if readMessage(c, &h, longestHello) == nil && h.Join != nil && h.Join.Ranks > 0 {
			g := newMeeting()
			g.objection(h.Join)
		}
	})
}

// FuzzVerdict reads the reply of a meeting and the notices of neighbours.
func FuzzVerdict(f *testing.F) {
	f.Add([]byte(`{"Rank":1,"Members":[{"Address":"unix @x"},{"Address":"tcp 127.0.0.1:1"}]}`))
	f.Add([]byte(`{"Rank":-1,"Members":[]}`))
	f.Add([]byte(`{"Kind":"failure","Rank":-9,"Text":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		message := append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
		var n notice
		_ = readMessage(bytes.NewReader(message), &n, longestMessage)
		var v verdict
		if readMessage(bytes.NewReader(message), &v, longestMessage) != nil || v.check() != nil || v.Result != ncclapi.Success {
			return
		}
		require.Less(t, v.Rank, len(v.Members))
	})
}

// FuzzParseID reads unique ids.
func FuzzParseID(f *testing.F) {
	id, err := makeID(randomToken(), "unix @x")
	require.NoError(f, err)
	f.Add(id[:])
	f.Add([]byte(idMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		var id ncclapi.UniqueID
		copy(id[:], b)
		_, _, _ = parseID(&id)
	})
}

// TestUnauthenticatedPeersOfACommunicator opens more connections than there are places, and says too much.
func TestUnauthenticatedPeersOfACommunicator(t *testing.T) {
	ln, err := net.Listen("unix", "@chorus-test-"+randomToken().String())
	require.NoError(t, err)
	secret := randomToken()
	came := make(chan string, 1)
	a := newAcceptor(ln, secret, func(c net.Conn, h *hello) {
		c.Close()
		came <- h.Use
	}, nil)
	defer a.close()
	conns := make([]net.Conn, 0, mostGreeting+50)
	for range cap(conns) {
		c, err := net.Dial("unix", ln.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		conns = append(conns, c)
	}
	for _, c := range conns[:50] { // these had to go
		c.SetReadDeadline(time.Now().Add(greetTimeout / 2))
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
	}
	long := conns[len(conns)-1]
	_, err = long.Write(binary.BigEndian.AppendUint32(nil, longestHello+1))
	require.NoError(t, err)
	_, err = long.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	c, err := greet("unix "+ln.Addr().String(), &hello{Token: secret, Use: "data"})
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, "data", <-came)
}
