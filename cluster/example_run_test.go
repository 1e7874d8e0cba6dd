package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
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
	job := fmt.Sprintf("example-%d", os.Getpid()) // each job of a user on a host has another name
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() {
			if err := meet(job, rank); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	// Output: rank 1 has read "hello"
}

// Without a secret, the processes must have the same user and host. They meet at a Unix socket, which has its name
// from the job and the address. Processes on several hosts need a Secret and the address of rank 0's host.
func meet(job string, rank int) error {
	ctx := context.Background()
	sess, err := cluster.Join(ctx, &cluster.JoinConfig{Job: job, Size: 2, Rank: &rank, Addr: "127.0.0.1:29500", Serve: rank == 0})
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
