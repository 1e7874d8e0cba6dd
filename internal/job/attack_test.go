package job

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var attackTime = flag.Duration("attack", 2*time.Second, "how long TestUnderAttack attacks; from 20s on it checks the processor's time, too")

const (
	attackConns   = 1000
	attackPackets = 10_000 // in a second
)

// attackMain is a stranger on the network: it holds many connections to the coordinator and
// the gossip of a host, on which it says nothing, garbage, or garbage slowly, opens others for
// those that are closed, and sends packets. It ends with its standard input.
func attackMain(coordinator, gossip string) int {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var opened, sent atomic.Int64
	noise := make([]byte, 1200)
	rand.Read(noise)
	for i := range attackConns {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := net.DialTimeout("tcp", []string{coordinator, gossip}[i%2], time.Second)
				if err != nil {
					Sleep(ctx, 10*time.Millisecond)
					continue
				}
				opened.Add(1)
				stop := context.AfterFunc(ctx, func() { c.Close() })
				switch i % 3 {
				case 0:
					_, _ = c.Write(noise)
				case 1:
					for j := 0; j < len(noise) && Sleep(ctx, 50*time.Millisecond); j++ {
						if _, err := c.Write(noise[j : j+1]); err != nil {
							break
						}
					}
				}
				_, _ = io.Copy(io.Discard, c)
				stop()
				c.Close()
				Sleep(ctx, time.Second)
			}
		})
	}
	wg.Go(func() {
		c, err := net.Dial("udp", gossip)
		if err != nil {
			return
		}
		defer c.Close()
		begin := time.Now()
		for ctx.Err() == nil {
			for due := int64(time.Since(begin).Seconds() * attackPackets); sent.Load() < due; sent.Add(1) {
				_, _ = c.Write(noise)
			}
			Sleep(ctx, time.Millisecond)
		}
	})
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	wg.Wait()
	fmt.Println(opened.Load(), sent.Load())
	return 0
}

// TestUnderAttack: a job goes on while a stranger attacks one of its hosts, and costs little.
func TestUnderAttack(t *testing.T) {
	as, errs := startAll(t, onLoopback(t, 2, 2)...)
	require.NoError(t, errors.Join(errs...))
	target := as[0]
	if target.Coord == nil || target.Gossip == nil {
		target = as[1]
	}
	require.NotNil(t, target.Gossip)
	before := heapNow()
	processor := processorTime()
	begin := time.Now()

	cmd := exec.Command("/proc/self/exe", "attack", target.Addr, target.Gossip.ML.LocalNode().Address())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	most := uint64(0)
	for time.Since(begin) < *attackTime {
		for _, a := range as {
			err := context.DeadlineExceeded
			for range 10 { // a busy machine answers late
				if _, err = a.k.AskMissing(); !errors.Is(err, context.DeadlineExceeded) {
					break
				}
			}
			require.NoError(t, err, "the coordinator answers its members")
			require.NoError(t, a.Context().Err())
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapInuse+m.StackInuse)
		Sleep(t.Context(), 200*time.Millisecond) // to look costs, too
	}
	took, used := time.Since(begin), processorTime()-processor
	in.Close()
	var opened, sent int64
	_, err = fmt.Fscan(out, &opened, &sent)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
	t.Logf("%d connections and %d packets in %v: %.1f%% of a core, %d KiB at most, %d KiB before", opened, sent, took.Round(time.Millisecond),
		100*used.Seconds()/took.Seconds(), most>>10, before>>10)
	require.Less(t, most, before+attackMemory)
	if *attackTime >= 20*time.Second {
		require.Less(t, used.Seconds()/took.Seconds(), 0.2)
	}
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
