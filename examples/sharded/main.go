// Sharded trains the classifier of the ddp example with an optimiser whose state is
// spread over the ranks: a comm.Sharder reduces each rank's share of the gradients
// to that rank, which updates its share of the parameters and sends them to the
// others. It runs on all devices of one process, or in the processes of a job.
//
//	bin/sharded
//	chorus run --nproc-per-node 4 -- bin/sharded
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

func main() {
	file := flag.String("json", "", "write the results to this `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *file); err != nil {
		fmt.Fprintln(os.Stderr, "sharded:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, file string) error {
	begun := time.Now()
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
		fmt.Fprintln(os.Stderr, "sharded:", note)
	}
	g, err := join(ctx, sess, sys)
	if err != nil {
		return err
	}
	defer g.Close()
	res, err := train(ctx, g)
	if err != nil {
		return err
	}
	// Leave together, so that no rank takes another for lost.
	if err := errors.Join(g.Shutdown(ctx), sess.Shutdown(ctx)); err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if sess.Rank() != 0 {
		return nil
	}
	fmt.Println(res)
	fmt.Printf("each rank has %d of %d bytes of momenta\n", res.StateBytes, res.ModelBytes)
	return res.Write(file)
}

// join makes a group of the processes of the job, or of the devices of this one if
// it is alone.
func join(ctx context.Context, sess *cluster.Session, sys *device.System) (*comm.Group, error) {
	if sess.Size() == 1 {
		return comm.Local(ctx, sys.Devices()...)
	}
	dev, err := sys.Open(sess.LocalRank())
	if err != nil {
		return nil, err
	}
	return comm.Join(ctx, sess, dev)
}
