// Allreduce measures all-reduce over the processes of a job, like PyTorch programs
// measure torch.distributed: it enqueues operations in a series and waits for the last
// one.
//
//	chorus run --nproc-per-node auto -- bin/allreduce -since $(date +%s.%N)
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/gochorus/chorus/comm"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("allreduce: ")
	since := flag.Float64("since", 0, "start of the job in `unix time`, to print the time until the end of the first all-reduce")
	limit := flag.Int("max", 1<<28, "largest size in `bytes`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, *since, *limit); err != nil {
		log.Fatal(err)
	}
}

func measure(ctx context.Context, since float64, limit int) error {
	g, err := comm.Init(ctx, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	if g.Size() == 1 {
		return errors.New("all-reduce needs several processes: start it with chorus run")
	}
	if err := first(ctx, g); err != nil {
		return err
	}
	if since > 0 && g.Rank() == 0 {
		now := float64(time.Now().UnixNano()) / 1e9
		fmt.Printf("from the start to the end of the first all-reduce: %.3f s\n", now-since)
	}
	for _, bytes := range []int{8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 1 << 28} {
		if bytes > limit {
			break
		}
		if err := size(ctx, g, bytes); err != nil {
			return err
		}
	}
	return g.Shutdown(ctx)
}

// first reduces one number and checks the result.
func first(ctx context.Context, g *comm.Group) error {
	xs, err := comm.Make[float32](g, 2)
	if err != nil {
		return err
	}
	defer xs.Close()
	in, out := []float32{1, float32(g.Rank())}, make([]float32, 2)
	if err := xs[0].CopyFrom(g.Stream(0), in); err != nil {
		return err
	}
	if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
		return err
	}
	if err := g.Wait(ctx); err != nil {
		return err
	}
	if err := xs[0].CopyTo(g.Stream(0), out); err != nil {
		return err
	}
	n := g.Size()
	if out[0] != float32(n) || out[1] != float32(n*(n-1)/2) {
		return fmt.Errorf("the first all-reduce gave %v: want %d and %d", out, n, n*(n-1)/2)
	}
	return nil
}

// size prints the time of one operation: the median of several rounds of n
// operations each.
func size(ctx context.Context, g *comm.Group, bytes int) error {
	const rounds = 9
	n := 200
	if bytes >= 1<<24 {
		n = 20
	}
	xs, err := comm.Make[float32](g, bytes/4)
	if err != nil {
		return err
	}
	defer xs.Close()
	data := make([]float32, bytes/4)
	for i := range data {
		data[i] = rand.Float32() / 1024
	}
	var took, host [rounds]time.Duration
	for r := range rounds {
		if err := xs[0].CopyFrom(g.Stream(0), data); err != nil {
			return err
		}
		if err := repeat(ctx, g, xs, 20, nil); err != nil { // warm up, together
			return err
		}
		start := time.Now()
		if err := repeat(ctx, g, xs, n, &host[r]); err != nil {
			return err
		}
		took[r] = time.Since(start)
	}
	slices.Sort(took[:])
	slices.Sort(host[:])
	if g.Rank() == 0 {
		per := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 / float64(n) }
		t := per(took[rounds/2])
		fmt.Printf("all-reduce %10d B: %9.2f us (best %.2f), host %.2f us, bus %.1f GB/s\n", bytes, t, per(took[0]), per(host[rounds/2]),
			float64(bytes)/t/1e3*2*float64(g.Size()-1)/float64(g.Size()))
	}
	return nil
}

func repeat(ctx context.Context, g *comm.Group, xs comm.Shards[float32], n int, host *time.Duration) error {
	start := time.Now()
	for range n {
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			return err
		}
	}
	if host != nil {
		*host = time.Since(start)
	}
	// Group.Wait polls, which would distort the figures. Use a blocking wait.
	if err := g.Stream(0).Sync(context.Background()); err != nil {
		return err
	}
	return errors.Join(g.Err(), context.Cause(ctx))
}
