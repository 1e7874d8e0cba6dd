package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The test binary is the program when this is set.
const asProgram = "PUSH_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	testgpu.Main(m)
}

// A process is a running program whose output others wait for.
type process struct {
	*exec.Cmd
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // has a value after more output
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case p.more <- struct{}{}:
	default:
	}
	return p.text.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// await waits for output that matches.
func (p *process) await(t *testing.T, ctx context.Context, pattern string) {
	t.Helper()
	for want := regexp.MustCompile(pattern); !want.MatchString(p.output()); {
		select {
		case <-p.more:
		case <-ctx.Done():
			require.Fail(t, "no such output", "want %s in:\n%s", pattern, p.output())
		}
	}
}

// Receivers come, leave, and are lost within a push; the training and the other receivers go on, and each push
// that a receiver reports has the weights of its step.
func TestPush(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	addr := freeAddress(t)
	device := 0
	start := func(faults string, args ...string) *process {
		p := &process{Cmd: exec.CommandContext(ctx, os.Args[0], append(args, "-addr", addr, "-device", fmt.Sprint(device), "-pause", "20ms")...), more: make(chan struct{}, 1)}
		device++
		p.Env = append(os.Environ(), asProgram+"=1", env.Backend.Name+"=virtual", env.VirtualDevices.Name+"=5", env.VirtualFaults.Name+"="+faults)
		p.Stdout, p.Stderr = p, p
		require.NoError(t, p.Start())
		return p
	}
	trainers := []*process{start("", "-trainer", "0"), start("", "-trainer", "1")}
	a := start("", "-receiver", "a")
	a.await(t, ctx, "a has the weights of step")
	b := start("lose@ncclRecv#12", "-receiver", "b")
	require.Error(t, b.Wait())
	require.Contains(t, b.output(), "b has the weights of step")
	trainers[0].await(t, ctx, `(?s)generation \d+: \[a b\].*generation \d+: \[a\]`)
	c := start("", "-receiver", "c", "-pushes", "3")
	c.await(t, ctx, "(?s)(c has the weights of step .*){3}c leaves after 3 pushes")
	require.NoError(t, c.Wait(), c.output())
	seen := len(a.output())
	require.Eventually(t, func() bool { // with a alone, or with the others before they had left
		return regexp.MustCompile("a has the weights of step").MatchString(a.output()[seen:])
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, trainers[0].Process.Signal(syscall.SIGTERM))
	for i, p := range trainers {
		require.NoError(t, p.Wait(), p.output())
		require.Regexp(t, fmt.Sprintf("trainer %d has done \\d+ steps", i), p.output())
	}
	require.NoError(t, a.Wait(), a.output())
	for _, p := range []*process{a, c} {
		require.NotContains(t, p.output(), "want", "a receiver had other weights")
	}
}

// freeAddress returns an address whose port and the next two are free.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 100 {
		first, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, first.Close())
		port := first.Addr().(*net.TCPAddr).Port
		free := true
		for i := range 3 {
			l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port+i))
			if free = free && err == nil; err == nil {
				require.NoError(t, l.Close())
			}
		}
		if free {
			return fmt.Sprint("127.0.0.1:", port)
		}
	}
	require.Fail(t, "no three free ports")
	return ""
}
