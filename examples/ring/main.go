// Ring passes a number around: each process receives from the previous rank, adds
// one, and sends to the next rank.
//
//	chorus run --nproc-per-node 4 -- bin/ring
package main

import (
	"context"
	"fmt"
	"log"
	"os/signal"
	"syscall"

	"github.com/gochorus/chorus/comm"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("ring: ")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := ring(ctx); err != nil {
		log.Fatal(err)
	}
}

func ring(ctx context.Context) error {
	g, err := comm.Init(ctx, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	if err := pass(ctx, g); err != nil {
		return err
	}
	return g.Shutdown(ctx) // leaves the job together with the other processes
}

func pass(ctx context.Context, g *comm.Group) error {
	rank, size, s := g.Rank(), g.Size(), g.Stream(0)
	xs, err := comm.Make[int64](g, 1)
	if err != nil {
		return err
	}
	defer xs.Close()
	hop := make([]int64, 1)
	if rank > 0 {
		if err := comm.Recv(g, rank-1, xs[0]); err != nil {
			return err
		}
		if err := g.Wait(ctx); err != nil {
			return err
		}
		if err := xs[0].CopyTo(s, hop); err != nil {
			return err
		}
	}
	hop[0]++
	fmt.Printf("rank %d of %d is hop %d\n", rank, size, hop[0])
	if rank < size-1 {
		if err := xs[0].CopyFrom(s, hop); err != nil {
			return err
		}
		if err := comm.Send(g, rank+1, xs[0]); err != nil {
			return err
		}
	}
	return g.Wait(ctx)
}
