package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/cluster"
)

// A process that no launcher has started is a world of its own, so the same
// program runs by itself, too.
func Example() {
	ctx := context.Background()
	sess, err := cluster.Attach(ctx)
	if err != nil {
		log.Fatal(err)
	}
	if sess.Rank() == 0 {
		if err := sess.Set(ctx, "id", []byte("0123")); err != nil {
			log.Fatal(err)
		}
	}
	id, err := sess.Get(ctx, "id") // waits for rank 0
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("rank %d of %d has id %s\n", sess.Rank(), sess.Size(), id)
	if err := sess.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: rank 0 of 1 has id 0123
}

// The cause of a session's context says which process was lost.
func ExampleSession_Context() {
	sess, err := cluster.Attach(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	sess.Close()
	<-sess.Context().Done()
	cause := context.Cause(sess.Context())
	if lost, ok := errors.AsType[*cluster.MemberLostError](cause); ok {
		fmt.Println("lost", lost.Who(), lost.Reason)
	}
	fmt.Println(cause)
	// Output: cluster: session is closed
}

// Pods that know each other's addresses need no launcher. Each calls Join with the same list and its own
// index; the first one coordinates. Here the pods are goroutines.
func ExampleJoin_peers() {
	ctx := context.Background()
	peers := []string{"127.0.0.1:29517", "127.0.0.1:29518"}
	secret := []byte("at least 16 bytes, the same for all")
	done := make(chan error)
	for index := range peers {
		go func() {
			sess, err := cluster.Join(ctx, &cluster.JoinConfig{Job: "gang", Peers: peers, Rank: &index, Secret: secret, Timing: cluster.Timing{Join: time.Minute}})
			if err == nil {
				err = errors.Join(sess.Barrier(ctx, "ready"), sess.Shutdown(ctx)) // a *cluster.JoinTimeoutError would name who is missing
			}
			done <- err
		}()
	}
	fmt.Println(<-done, <-done)
	// Output: <nil> <nil>
}
