package job

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestPacketFilter: the kernel passes on no packet that lacks a byte of the label.
func TestPacketFilter(t *testing.T) {
	for length := 1; length <= 40; length++ {
		label := bytes.Repeat([]byte{labelHeader, 3, 0, 255}, 10)[:length]
		to, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		require.NoError(t, err)
		defer to.Close()
		require.NoError(t, keepLabelled(to, label))
		from, err := net.DialUDP("udp", nil, to.LocalAddr().(*net.UDPAddr))
		require.NoError(t, err)
		defer from.Close()
		for at := range label {
			wrong := append(bytes.Clone(label), "data"...)
			wrong[at] ^= 1 << (at % 8)
			_, err = from.Write(wrong)
			require.NoError(t, err)
			_, err = from.Write(label[:at])
			require.NoError(t, err)
		}
		for _, good := range [][]byte{label, append(bytes.Clone(label), bytes.Repeat([]byte{7}, 30_000)...)} {
			_, err = from.Write(good)
			require.NoError(t, err)
			require.NoError(t, to.SetReadDeadline(time.Now().Add(time.Minute)))
			got := make([]byte, maxPacket)
			n, err := to.Read(got)
			require.NoError(t, err)
			require.Equal(t, good, got[:n])
		}
	}
}
