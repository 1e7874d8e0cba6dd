package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/safe"
)

// otherUserMain is a process of another user, who knows all but a secret. It joins a job as
// rank 1, or coordinates it, until its standard input ends.
func otherUserMain(deed, name, addr string) int {
	keys, err := job.DeriveKeys(nil, name)
	if err != nil {
		return 1
	}
	switch deed {
	case "join":
		l, hello, err := job.Target{Job: name, Addr: addr, Key: keys.Control}.Dial(context.Background())
		if err != nil {
			fmt.Println("kept out:", err)
			return 0
		}
		fmt.Println("inside of the job of", hello.Host)
		l.Close()
	case "coordinate":
		ln, err := (*job.System)(nil).ListenAt(addr)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		ln = trusting{ln}
		c := job.NewServer(ln, job.ServerConfig{Job: name, Key: keys.Control, Notify: func(string) {}, CoordConfig: job.CoordConfig{Size: 2, Self: job.Welcome{Host: "other-user", PID: os.Getpid(), Heartbeat: quick.Heartbeat, LostAfter: quick.LostAfter}}})
		fmt.Println("listening")
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		c.Close()
	case "accept-nothing":
		at := &syscall.SockaddrUnix{Name: addr}
		var fds [2]int
		for i := range fds {
			if fds[i], err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0); err != nil {
				return 1
			}
		}
		if err := errors.Join(syscall.Bind(fds[0], at), syscall.Listen(fds[0], 0), syscall.Connect(fds[1], at)); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("listening")
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	}
	return 0
}

// trusting hides that connections are of Unix sockets: another user's coordinator takes all.
type trusting struct{ net.Listener }

func (l trusting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return struct{ net.Conn }{c}, err
}

// startOtherUser starts otherUserMain as another user.
func startOtherUser(t *testing.T, deed, job, addr string) (out *bufio.Reader, end func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	cmd := exec.Command("/proc/self/exe", "other-user", deed, job, addr) // a link that needs no path
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	end = sync.OnceFunc(func() {
		in.Close()
		require.NoError(t, cmd.Wait())
	})
	t.Cleanup(end)
	return bufio.NewReader(pipe), end
}

// oneHostEnvs are the environments of rank r of a world of two on one host, by launcher.
var oneHostEnvs = map[string]string{
	"torchrun":   "RANK=%d WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=%s",
	"slurm":      "SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n1 CHORUS_SEEDS=n1:%s",
	"openmpi":    "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 CHORUS_SEEDS=127.0.0.1:%s",
	"pmi":        "PMI_RANK=%d PMI_SIZE=2 CHORUS_SEEDS=127.0.0.1:%s",
	"kubernetes": "JOB_COMPLETION_INDEX=%d CHORUS_WORLD_SIZE=2 CHORUS_SEEDS=127.0.0.1:%s",
}

func oneHostConfig(t *testing.T, launcher, port string, rank int) *JoinConfig {
	t.Helper()
	cfg, err := detect(environ(fmt.Sprintf(oneHostEnvs[launcher], rank, port) + " CHORUS_LAUNCHER=" + launcher))
	require.NoError(t, err)
	cfg.Timing = quick
	return cfg
}

// TestOneHostNeedsNoSecret runs a world of two by each launcher's environment, while another
// user tries to be one of them.
func TestOneHostNeedsNoSecret(t *testing.T) {
	for launcher := range oneHostEnvs {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			_, port, _ := net.SplitHostPort(freeAddr(t))
			lines := make(chan string, 16)
			var wg sync.WaitGroup
			var ss [2]*Session
			var errs [2]error
			start := func(r int) {
				c := oneHostConfig(t, launcher, port, r)
				c.Notify = func(line string) { lines <- line }
				wg.Go(func() { ss[r], errs[r] = Join(t.Context(), c) })
			}
			start(0)
			c := oneHostConfig(t, launcher, port, 1)
			key, err := c.key()
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(c.at, "@chorus-job-"), c.at)
			if os.Geteuid() == 0 {
				to := job.Target{Job: c.Job, Addr: c.at, Key: key}
				for to.SameJob(t.Context()) != nil { // until rank 0 listens
					require.NoError(t, t.Context().Err())
				}
				out, _ := startOtherUser(t, "join", c.Job, c.at)
				text, err := out.ReadString('\n')
				require.NoError(t, err)
				require.Contains(t, text, "kept out:")
				requireLine(t, lines, "the process at a socket of this host: the process ")
			}
			start(1)
			wg.Wait()
			require.NoError(t, errors.Join(errs[:]...))
			for _, s := range ss[:] {
				defer s.Close()
			}
			require.NoError(t, ss[1].Set(t.Context(), "k", []byte("v")))
			b, err := ss[0].Get(t.Context(), "k")
			require.NoError(t, err)
			require.Equal(t, "v", string(b))
		})
	}
}

// TestOtherUserCoordinates takes the place of rank 0 before it comes.
func TestOtherUserCoordinates(t *testing.T) {
	for _, deed := range []string{"coordinate", "accept-nothing"} {
		_, port, _ := net.SplitHostPort(freeAddr(t))
		c := oneHostConfig(t, "torchrun", port, 1)
		_, err := c.key()
		require.NoError(t, err)
		out, _ := startOtherUser(t, deed, c.Job, c.at)
		text, err := out.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "listening\n", text)
		for r := range 2 {
			_, err := Join(t.Context(), oneHostConfig(t, "torchrun", port, r))
			var other *safe.UserError
			require.ErrorAs(t, err, &other, "%s, rank %d", deed, r)
			require.Equal(t, 65534, other.UID)
			require.ErrorContains(t, err, "choose another port")
		}
	}
}

// TestNoUserSocketAcrossSecrets: a process without the secret of rank 0 learns what to set.
func TestNoUserSocketAcrossSecrets(t *testing.T) {
	t.Parallel()
	_, port, _ := net.SplitHostPort(freeAddr(t))
	c := oneHostConfig(t, "torchrun", port, 1)
	c.Timing.Join = 3 * time.Second
	_, err := Join(t.Context(), c)
	require.ErrorContains(t, err, "rank 0 has not started yet, has a secret that this process lacks")
	require.ErrorContains(t, err, "set CHORUS_SECRET_FILE in all processes")
}
