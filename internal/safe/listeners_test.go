package safe

import (
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestNamesIn(t *testing.T) {
	a := "@prefix-" + strings.Repeat("A", 26)
	text := "Num       RefCount Protocol Flags    Type St Inode Path\n" +
		"ffff9: 00000002 00000000 00010000 0001 01 21845 " + a + "\n" +
		"ffff9: 00000002 00000000 00010000 0001 01 218 @x\n\n\nffff: 3\n" +
		"ffff9: 00000003 00000000 00000000 0001 03 23456\n" +
		"ffff9: 00000002 00000000 00010000 0001 01 21845 x " + a + "\n" +
		"ffff9: 00000002 00000000 00010000 0001 01   845 " + a + "\n"
	require.Equal(t, []string{a}, namesIn(text, "@prefix-"))
	require.Empty(t, namesIn("", "@prefix-"))
}

// The kernel and /proc name the same sockets, and the kernel also says whose they are.
func TestNamedListeners(t *testing.T) {
	prefix := "@chorus-test-" + t.TempDir()
	for _, name := range []string{prefix, prefix + "\n\nx", prefix + "-packets"} {
		network := "unix"
		if strings.HasSuffix(name, "packets") {
			network = "unixpacket"
		}
		ln, err := net.Listen(network, name)
		require.NoError(t, err)
		defer ln.Close()
	}
	for range 3 { // with and without others at the same time
		list, err := NamedListeners(prefix)
		require.NoError(t, err)
		require.ElementsMatch(t, []NamedListener{{Name: prefix, Owner: ThisUser}, {Name: prefix + "\n\nx", Owner: ThisUser}}, list)
	}
	list, err := NamedListeners(prefix + "no")
	require.NoError(t, err)
	require.Empty(t, list)
}

func TestDamagedDiagMessages(t *testing.T) {
	var list []NamedListener
	message := make([]byte, 20)
	message[0], message[4] = 20, unix.NLMSG_ERROR
	message[16] = 0xfe // -2
	message[17], message[18], message[19] = 0xff, 0xff, 0xff
	_, err := diagMessages(message, "@", &list)
	require.ErrorIs(t, err, unix.ENOENT)
	for n := range byte(64) {
		message[0], message[4] = n, unix.SOCK_DIAG_BY_FAMILY
		_, err := diagMessages(message, "@", &list)
		require.Equal(t, n < 16 || n > 20, err != nil, n)
	}
	body := make([]byte, 24)
	body[1] = unix.SOCK_STREAM
	for n := range byte(64) {
		body[16] = n
		_, ok := diagListener(body)
		require.Equal(t, n > 4 && n <= 8, ok, n)
	}
	require.Empty(t, list)
}
