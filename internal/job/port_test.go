package job

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// A host that does not run the coordinator yet tells its user of processes that it refuses, and tells
// the same once.
func TestPortTellsRefusals(t *testing.T) {
	lines := make(chan string, 10)
	a := &Agent{cfg: Config{Job: "j", Notify: func(line string) { lines <- line }}}
	a.keys.Control = Credential{Key: make([]byte, KeyBytes)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := newPort(a)
	p.open(ln, ln.Addr().String())
	dial := func(job string, key byte) error {
		c, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		by := Credential{Key: make([]byte, KeyBytes)}
		by.Key[0] = key
		_, err = dialHandshake(c, job, by)
		return err
	}
	require.ErrorIs(t, dial("another", 0), errOtherJob)
	require.Regexp(t, `^job j: refused the process at 127\.0\.0\.1:\d+: it belongs to a different job$`, <-lines)
	require.ErrorIs(t, dial("another", 0), errOtherJob)
	require.ErrorIs(t, dial("j", 1), errBadProof)
	require.Regexp(t, `^job j: refused the process at .*: it has a different secret$`, <-lines)
	p.close()
	close(lines)
	for line := range lines {
		require.NotContains(t, line, "different job", "it was said before")
	}
}

// TestRefusedLinesAreLimited: an attacker with many addresses, who is refused for a reason that is worth a line, does not fill
// the terminal.
func TestRefusedLinesAreLimited(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		var f lineFilter
		lines := 0
		refuse := func() {
			for i := range 1000 {
				f.refuse(addressed{from: &net.TCPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i)), Port: 1}}, errOtherJob, func(string) { lines++ })
			}
		}
		refuse()
		require.Equal(t, maxRefused, lines)
		require.True(t, f.isNew("10.0.0.1", "a line about a member"))
		time.Sleep(WaitLine)
		refuse()
		require.Equal(t, 2*maxRefused, lines)
	})
}

// An addressed is a connection that has an address, and nothing else.
type addressed struct {
	net.Conn
	from net.Addr
}

func (a addressed) RemoteAddr() net.Addr { return a.from }
