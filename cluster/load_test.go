package cluster

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

var attackTime = flag.Duration("attack", 2*time.Second, "how long the tests of hostile processes attack; from 20s on they check times, too")

var hostileTime = flag.Duration("hostile", 2*time.Second, "how long the ranks of TestHostileRanks are hostile; from 10s on it checks times and memory, too")

const (
	floodHeld    = 1000
	floodNew     = 2000   // connections in a second
	floodPackets = 10_000 // in a second
)

// floodMain is a stranger on the network who has read gossip's label in a packet. It holds connections to two ports whose
// first bytes are all that there are, opens and closes others, and sends packets, every second one with the label. It ends
// with its standard input.
func floodMain(coordinator, gossip, label string) int {
	labelled, err := hex.DecodeString(label)
	if err != nil {
		return 1
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	var opened, sent atomic.Int64
	to := []string{coordinator, gossip}
	noise := make([]byte, 1200)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	labelled = append(labelled, noise[:1000]...)
	hold := func(addr string, first byte, limit time.Duration) {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			job.Sleep(ctx, 10*time.Millisecond)
			return
		}
		defer c.Close()
		opened.Add(1)
		stop := context.AfterFunc(ctx, func() { c.Close() })
		defer stop()
		_ = c.SetDeadline(time.Now().Add(limit))
		switch {
		case first == labelled[0]:
			_, _ = c.Write(labelled)
		case first%2 == 0:
			_, _ = c.Write([]byte{first})
		default:
			_, _ = c.Write(append([]byte{first}, noise...))
		}
		_, _ = io.Copy(io.Discard, c)
	}
	for i := range floodHeld {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				hold(to[i%2], byte(i/2), time.Hour)
				job.Sleep(ctx, time.Second)
			}
		})
	}
	pace := func(perSecond int, fn func(i int64)) {
		begin, n := time.Now(), int64(0)
		for ctx.Err() == nil {
			due := int64(time.Since(begin).Seconds() * float64(perSecond))
			for n = max(n, due-int64(perSecond/20)); n < due; n++ { // what a busy machine has not let it do, it does not do at once
				fn(n)
			}
			job.Sleep(ctx, time.Millisecond)
		}
	}
	wg.Go(func() {
		pace(floodNew, func(i int64) { wg.Go(func() { hold(to[i%2], byte(i/2), 200*time.Millisecond) }) })
	})
	wg.Go(func() {
		c, err := net.Dial("udp", gossip)
		if err != nil {
			return
		}
		defer c.Close()
		pace(floodPackets, func(i int64) {
			_, _ = c.Write([][]byte{labelled, noise}[i%2])
			sent.Add(1)
		})
	})
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	wg.Wait()
	fmt.Println(opened.Load(), sent.Load())
	return 0
}

// TestRejoinUnderAttack loses a worker while a stranger floods the coordinator and the gossip of its host, from the address
// that the members have, too. The worker that is started in its place joins. It is soon on a machine that has time for the flood;
// otherwise the flood takes the places of attempts that the coordinator has not read yet, and the worker needs several.
func TestRejoinUnderAttack(t *testing.T) {
	as, rs := elasticJob(t, RunConfig{}, elasticHosts(t, 1, 2, 1000)...)
	host := as[0]
	if host.Coord == nil {
		host = as[1]
	}
	require.NotNil(t, host.Gossip)
	time.Sleep(200 * time.Millisecond) // for both hosts to have connected
	before, processor, begin := residentNow(t, os.Getpid()), processorTime(), time.Now()
	label := host.Gossip.Transport.Run.Load().Label
	cmd := exec.Command("/proc/self/exe", "flood", host.Addr, host.Gossip.ML.LocalNode().Address(), hex.EncodeToString(label))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer cmd.Process.Kill()
	var most, rejoins int
	var longest time.Duration
	for range 2 { // more of them would exclude the host
		job.Sleep(t.Context(), max(*attackTime/4, time.Second)) // the last start is over
		lost := time.Now()
		rs[1].kill(t, rs[1].last(t))
		order := orderOf(t, as[1])
		require.True(t, order.Start)
		job.Sleep(t.Context(), order.After)
		rs[1] = runWorker(t, as[1], 0, RunConfig{})
		rs[1].awaitSize(t, 2)
		rs[0].awaitSize(t, 2)
		longest = max(longest, time.Since(lost)-order.After)
		rejoins++
		most = max(most, residentNow(t, os.Getpid()))
	}
	for job.Sleep(t.Context(), 200*time.Millisecond) && time.Since(begin) < *attackTime {
		most = max(most, residentNow(t, os.Getpid()))
	}
	took, used := time.Since(begin), processorTime()-processor
	in.Close()
	var opened, sent int64
	_, err = fmt.Fscan(out, &opened, &sent)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
	core := 100 * used.Seconds() / took.Seconds()
	t.Logf("%d connections and %d packets in %v: %d rejoins in at most %v, both launchers and workers %.1f%% of a core, %d KiB at most, %d KiB before",
		opened, sent, took.Round(time.Millisecond), rejoins, longest.Round(time.Millisecond), core, most, before)
	require.Positive(t, rejoins)
	require.Less(t, most, before+64<<10)
	if *attackTime >= 20*time.Second { // on a machine without other work
		require.Less(t, longest, 5*time.Second)
		require.Less(t, core/2, 25.0, "each of the launchers, with its workers")
	}
	finishAll(t, as, rs...)
}

// residentNow returns the memory of a process in KiB.
func residentNow(t *testing.T, pid int) int { return statusOf(t, pid, "VmRSS:") }

func statusOf(t *testing.T, pid int, name string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.SplitSeq(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, name); ok {
			n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(rest, "kB")))
			require.NoError(t, err)
			return n
		}
	}
	require.Fail(t, "no "+name)
	return 0
}

// launcherMain is a launcher without workers. It prints their environments, and ends with its standard input.
func launcherMain(workers int) int {
	a, err := job.Start(context.Background(), &job.Config{Job: "hostile", LocalSize: workers, Notify: func(line string) { fmt.Fprintln(os.Stderr, line) }})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer a.Close()
	var all [][]string
	for local := range workers {
		all = append(all, a.WorkerEnv(local))
	}
	_ = json.NewEncoder(os.Stdout).Encode(all)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// goodMain is a rank that uses the store until its standard input ends, and prints how long its calls took.
func goodMain() int {
	ctx := context.Background()
	s, err := Attach(ctx)
	if err != nil {
		fmt.Println("attach:", err)
		return 1
	}
	end := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(end) }()
	fmt.Println("attached")
	var longest time.Duration
	for n := 0; ; n++ {
		select {
		case <-end:
			fmt.Println(n, longest.Nanoseconds())
			return 0
		default:
		}
		begun := time.Now()
		err := s.Set(ctx, "good", []byte("x"))
		if err == nil {
			_, err = s.Get(ctx, "good")
		}
		if err != nil && !errors.Is(err, ErrStoreFull) {
			fmt.Println("call:", err)
			return 2
		}
		longest = max(longest, time.Since(begun)/2)
		time.Sleep(5 * time.Millisecond)
	}
}

// TestHostileRanks lets all ranks but one do what costs the coordinator most: as many waits as a rank may have for values,
// lists and names of the greatest size, changes of what many wait for, additions of a byte to long values, barriers, and
// questions. The calls of the other rank go on, and the launcher needs little memory.
func TestHostileRanks(t *testing.T) {
	const n = 5
	launcher := exec.Command("/proc/self/exe", "launcher", strconv.Itoa(n))
	launcher.Stderr = os.Stderr
	hold, err := launcher.StdinPipe()
	require.NoError(t, err)
	out, err := launcher.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, launcher.Start())
	defer func() { hold.Close(); launcher.Wait() }()
	var envs [][]string
	require.NoError(t, json.NewDecoder(out).Decode(&envs))
	good := exec.Command("/proc/self/exe", "good")
	good.Env = append(os.Environ(), envs[0]...)
	goodIn, err := good.StdinPipe()
	require.NoError(t, err)
	goodOut, err := good.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, good.Start())
	defer good.Wait()
	defer good.Process.Kill()
	ss := make([]*Session, n)
	require.NoError(t, parallel(n-1, func(i int) error {
		j, err := detect(environ(strings.Join(envs[i+1], " ")))
		if err != nil {
			return err
		}
		ss[i], err = Join(t.Context(), j)
		return err
	}))
	ss = ss[:n-1]
	lines := bufio.NewScanner(goodOut)
	require.True(t, lines.Scan())
	require.Equal(t, "attached", lines.Text())

	begun := time.Now()
	big := make([]byte, job.MaxValueBytes)
	var many, long []string
	for i := range job.MaxCallKeys / 2 {
		many = append(many, fmt.Sprint("m", i))
	}
	for i := range 1000 {
		long = append(long, fmt.Sprint(strings.Repeat("l", job.MaxKeyBytes-8), i))
	}
	keys := func(names ...string) (fields [][]byte) {
		for _, name := range names {
			fields = append(fields, []byte(name))
		}
		return fields
	}
	list := job.Call{Op: job.OpSetAll}
	for _, name := range many {
		list.Fields = append(list.Fields, []byte(name), []byte{})
	}
	var wg sync.WaitGroup
	var calls atomic.Int64
	for _, s := range ss {
		k := s.k
		send := func(c job.Call) {
			k.Mu.Lock()
			k.LastID++
			id := k.LastID
			k.Mu.Unlock()
			_ = k.Send(job.Message{Kind: job.KindCall, Epoch: job.FirstEpoch, ID: id, Body: c.Encode()}) // nobody reads the reply
			calls.Add(1)
		}
		wg.Go(func() {
			for round := 0; time.Since(begun) < *hostileTime && s.Context().Err() == nil; round++ {
				for range job.MaxWaits - 3000 {
					send(job.Call{Op: job.OpGetAll, Fields: keys("k", "l")})
				}
				for i := range 2000 {
					send(job.Call{Op: job.OpWait, Fields: keys("k", "l", "n", strconv.Itoa(i))})
				}
				send(job.Call{Op: job.OpWait, Fields: keys(append(many[:job.MaxWaitKeys/4:job.MaxWaitKeys/4], "n")...)})
				send(job.Call{Op: job.OpWait, Fields: keys(append(long[:len(long):len(long)], "n")...)})
				send(job.Call{Op: job.OpSet, Fields: [][]byte{[]byte("k"), big}})
				send(job.Call{Op: job.OpSet, Fields: [][]byte{[]byte("l"), big}})
				for range 200 {
					send(job.Call{Op: job.OpDelete, Fields: keys("l")})
					send(job.Call{Op: job.OpSet, Fields: keys("l", "x")})
					send(job.Call{Op: job.OpAppend, Fields: keys("k2", "x")})
					_ = k.Send(job.Message{Kind: job.KindWho, Epoch: job.FirstEpoch, ID: 1})
				}
				send(job.Call{Op: job.OpSet, Fields: [][]byte{[]byte("k2"), big[:len(big)/2]}})
				send(list)
				for i := range 500 {
					send(job.Call{Op: job.OpBarrier, Fields: keys(fmt.Sprint(strings.Repeat("b", 500), i))})
				}
				send(job.Call{Op: job.OpDelete, Fields: keys("k")})
				send(job.Call{Op: job.OpDelete, Fields: keys("l")})
				_ = k.Stream.Flush(time.Second) // as fast as the coordinator reads
			}
		})
	}
	wg.Wait()
	took := time.Since(begun)
	goodIn.Close()
	require.True(t, lines.Scan())
	var count, longest int64
	_, err = fmt.Sscan(lines.Text(), &count, &longest)
	require.NoError(t, err, lines.Text())
	most := statusOf(t, launcher.Process.Pid, "VmHWM:")
	t.Logf("%d hostile calls in %v on %d processors: %d pairs of calls of the good rank took at most %v each, the launcher %d KiB at most",
		calls.Load(), took.Round(time.Millisecond), runtime.NumCPU(), count, time.Duration(longest).Round(time.Millisecond), most)
	require.Positive(t, count)
	for _, s := range ss {
		s.Close()
	}
	if *hostileTime >= 10*time.Second {
		require.Less(t, time.Duration(longest), 500*time.Millisecond)
		require.Less(t, most, 256<<10)
	}
}

// parallel calls f for 0 to n-1 at the same time.
func parallel(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
