package job

import (
	"io"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"
)

// FuzzGossip gives memberlist packets and streams of a stranger who has heard the label.
func FuzzGossip(f *testing.F) {
	const label = "0123456789abcdef"
	to, err := newGossipTransport("127.0.0.1", 0, newConnLimiter(), nil, nil)
	require.NoError(f, err)
	require.NoError(f, to.begin(gossipKeys{make([]byte, KeyBytes), label}))
	c := memberlist.DefaultLANConfig()
	c.Label, c.SecretKey, c.Transport, c.LogOutput = label, make([]byte, KeyBytes), to, io.Discard
	c.BindPort, c.AdvertisePort, c.TCPTimeout = to.port(), to.port(), time.Second
	list, err := memberlist.Create(c)
	require.NoError(f, err)
	f.Cleanup(func() { _ = list.Shutdown() })
	from, err := newGossipTransport("127.0.0.1", 0, newConnLimiter(), nil, nil)
	require.NoError(f, err)
	f.Cleanup(func() { _ = from.Shutdown() })

	f.Add([]byte{}) // an empty message
	f.Add([]byte{1})
	f.Add(append([]byte{10}, make([]byte, 64)...)) // an encrypted message
	f.Add([]byte{10, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		packet := append(append([]byte{}, to.Run.Load().Label...), b...)
		_, err := from.WriteTo(packet[:min(len(packet), 60_000)], to.tcp.Addr().String())
		require.NoError(t, err)
		s, err := from.DialTimeout(to.tcp.Addr().String(), time.Minute)
		require.NoError(t, err)
		_, _ = s.Write(packet) // memberlist may have closed it
		require.NoError(t, s.Close())
		require.Len(t, list.Members(), 1)
	})
}
