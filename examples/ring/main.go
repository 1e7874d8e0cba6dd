// Ring passes a number from rank to rank: each process receives from the one
// before it, adds one, and sends to the one after it.
//
//	chorus run --nproc-per-node 4 -- bin/ring
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os/signal"
	"syscall"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

func main() {
	log.SetFlags(0)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := ring(ctx); err != nil {
		log.Fatal("ring: ", err)
	}
}

func ring(ctx context.Context) error {
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" && sess.Rank() == 0 {
		log.Print("ring: ", note)
	}
	dev, err := sys.Open(sess.LocalRank())
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, sess, dev)
	if err != nil {
		return err
	}
	defer g.Close()
	if err := pass(ctx, g); err != nil {
		return err
	}
	return errors.Join(g.Shutdown(ctx), sess.Shutdown(ctx))
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
