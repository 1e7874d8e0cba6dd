package main

import (
	"bytes"
	"context"
	"fmt"
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
	"github.com/gochorus/chorus/internal/testhost"
)

// The test binary is the program when this is set.
const asProgram = "PUSH_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	testgpu.AllowStalls()
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
	p.awaitAfter(t, ctx, 0, pattern)
}

// awaitAfter waits for output behind the first bytes that matches.
func (p *process) awaitAfter(t *testing.T, ctx context.Context, seen int, pattern string) {
	t.Helper()
	for want := regexp.MustCompile(pattern); !want.MatchString(p.output()[seen:]); {
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
	addr, master := fmt.Sprintf("127.0.0.1:%d", testhost.Reserve(t)), testhost.Reserve(t)
	program := func(faults string, args ...string) *process {
		p := &process{Cmd: exec.CommandContext(ctx, os.Args[0], append(args, "-addr", addr, "-pause", "20ms")...), more: make(chan struct{}, 1)}
		p.Env = append(os.Environ(), asProgram+"=1", env.Backend.Name+"=virtual", env.VirtualDevices.Name+"=6", env.VirtualFaults.Name+"="+faults)
		p.Stdout, p.Stderr = p, p
		return p
	}
	var trainers []*process
	for rank := range 2 {
		p := program("")
		p.Env = append(p.Env, fmt.Sprint("RANK=", rank), "WORLD_SIZE=2", fmt.Sprint("LOCAL_RANK=", rank), "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", fmt.Sprint("MASTER_PORT=", master))
		require.NoError(t, p.Start())
		trainers = append(trainers, p)
	}
	device := len(trainers)
	receive := func(faults, name string, args ...string) *process {
		p := program(faults, append(args, "-receiver", name, "-device", fmt.Sprint(device))...)
		device++
		require.NoError(t, p.Start())
		return p
	}
	a := receive("", "a")
	a.await(t, ctx, "a has the weights of step")
	b := receive("lose@ncclRecv#12", "b")
	require.Error(t, b.Wait())
	lost, seen := time.Now(), len(a.output())
	require.Contains(t, b.output(), "b has the weights of step")
	trainers[0].await(t, ctx, `(?s)pushes to \[a b\].*pushes to \[a\]`)
	a.awaitAfter(t, ctx, seen, "a has the weights of step")
	t.Logf("a has the next weights %v after the end of b", time.Since(lost).Round(time.Millisecond))
	lost = time.Now()
	b = receive("", "b")
	b.await(t, ctx, "b has the weights of step")
	t.Logf("b has weights %v after its start under the same name", time.Since(lost).Round(time.Millisecond))
	c := receive("", "c", "-pushes", "3")
	c.await(t, ctx, "(?s)(c has the weights of step .*){3}c leaves after 3 pushes")
	require.NoError(t, c.Wait(), c.output())
	a.awaitAfter(t, ctx, len(a.output()), "a has the weights of step") // without c, or before c had left
	require.NoError(t, trainers[0].Process.Signal(syscall.SIGTERM))
	for i, p := range trainers {
		require.NoError(t, p.Wait(), p.output())
		require.Regexp(t, fmt.Sprintf("trainer %d has done \\d+ steps", i), p.output())
	}
	for _, p := range []*process{a, b} {
		require.NoError(t, p.Wait(), p.output())
	}
	for _, p := range []*process{a, b, c} {
		require.NotContains(t, p.output(), "want", "a receiver had other weights")
	}
}
