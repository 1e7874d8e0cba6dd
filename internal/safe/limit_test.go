package safe

import (
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Getenv("SOCKETS_TEST") != "" {
		os.Exit(fillDescriptors())
	}
	if len(os.Args) == 3 && os.Args[1] == "dial" {
		os.Exit(dial(os.Args[2]))
	}
	os.Exit(m.Run())
}

// The oldest connection that is not answered makes room. Connections that are answered stay, and those that come are closed
// if all are.
func TestListener(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := NewListener(inner, 3)
	defer l.Close()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", inner.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	accept := func() (client, server net.Conn) {
		client = dial()
		server, err = l.Accept()
		require.NoError(t, err)
		return client, server
	}
	requireClosed := func(c net.Conn) {
		t.Helper()
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
	}
	requireOpen := func(c net.Conn) {
		t.Helper()
		require.NoError(t, c.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	a, serverA := accept()
	b, serverB := accept()
	c, serverC := accept()
	SetActive(serverA, true)
	d, _ := accept()
	requireClosed(b)
	for _, c := range []net.Conn{a, c, d} {
		requireOpen(c)
	}
	require.Error(t, serverB.SetDeadline(time.Now()), "it is closed here, too")
	require.NoError(t, serverC.Close())
	e, serverE := accept()
	requireOpen(d)
	for _, s := range l.conns {
		SetActive(s, true)
	}
	SetActive(serverE, false)
	f, serverF := accept()
	requireClosed(e)
	SetActive(serverF, true)
	late := dial()
	go l.Accept() // refuses it, and waits for the next one
	requireClosed(late)
	requireOpen(f)
}

// A process that connections have filled up can still open files.
func TestReserve(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SOCKETS_TEST=yes")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func fillDescriptors() int {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: 200}); err != nil {
		panic(err)
	}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	l := NewListener(inner, 1000)
	go func() {
		for {
			if _, err := l.Accept(); err != nil {
				panic(err)
			}
		}
	}()
	// As many clients as fit beside the reserve: each of them has a descriptor of this process, too.
	var last net.Conn
	for range 65 {
		if last, err = net.Dial("tcp", inner.Addr().String()); err != nil {
			panic(err)
		}
	}
	_ = last.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := last.Read(make([]byte, 1)); err != io.EOF {
		panic("the last connection was not refused: " + err.Error())
	}
	for range reserve - 8 {
		if _, err := os.Open("/dev/null"); err != nil {
			panic(err)
		}
	}
	return 0
}
