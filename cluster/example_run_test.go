package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"sync"

	"github.com/gochorus/chorus/cluster"
)

// The function is called once for each set of processes. Without a launcher there is one set.
func ExampleRun() {
	err := cluster.Run(context.Background(), nil, func(ctx context.Context, w *cluster.World) error {
		fmt.Printf("epoch %d: rank %d of %d\n", w.Epoch(), w.Rank(), w.Size())
		for range 3 {
			if err := w.Step(); err != nil { // the set changes between two steps
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: epoch 1: rank 0 of 1
}

// Two members of a job meet without a launcher: one of them runs the coordinator.
func ExampleJoin() {
	l, err := net.Listen("tcp", "127.0.0.1:0") // finds a free port
	if err != nil {
		log.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() {
			if err := meet(addr, rank); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	// Output: rank 1 has read "hello"
}

func meet(addr string, rank int) error {
	ctx := context.Background()
	sess, err := cluster.Join(ctx, &cluster.JoinConfig{
		Job: "example", Size: 2, Rank: &rank, Addr: addr, Serve: rank == 0, Secret: []byte("sixteen bytes or more"),
	})
	if err != nil {
		return err
	}
	if rank == 0 {
		return errors.Join(sess.Set(ctx, "greeting", []byte("hello")), sess.Shutdown(ctx))
	}
	text, err := sess.Get(ctx, "greeting") // waits for rank 0
	fmt.Printf("rank %d has read %q\n", rank, text)
	return errors.Join(err, sess.Shutdown(ctx))
}
