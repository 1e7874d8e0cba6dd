// Elastic trains the classifier of examples/ddp and goes on when processes are lost, join
// or leave. The processes that remain keep their memory. A process that is started again
// receives the state of the training from another one. The global batch stays the same,
// so that the losses do not depend on the number of ranks.
//
//	chorus run --nproc-per-node 4 --max-restarts 5 -- bin/elastic -pause 200ms
//
// Kill one of the processes to see how the others go on.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/internal/training"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("elastic: ")
	file := flag.String("json", "", "`file` for the results in JSON")
	pause := flag.Duration("pause", 0, "time between two steps, for a slower run")
	epochs := flag.Int("epochs", training.Epochs, "number of passes over the data")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, *file, &trainer{pause: *pause, steps: func() int { return *epochs * training.Steps }})
	if errors.Is(err, cluster.ErrDismissed) {
		log.Print("this host leaves the job")
		return
	}
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, file string, t *trainer) error {
	begun := time.Now()
	dev, err := open()
	if err != nil {
		return err
	}
	if err := t.open(dev); err != nil {
		return err
	}
	defer t.close()
	if err := cluster.Run(ctx, nil, t.epoch); err != nil {
		return err
	}
	if !t.has {
		return nil // it came after the end
	}
	sum, err := t.checksum()
	if err != nil {
		return err
	}
	fmt.Printf("rank %d has parameters %08x\n", t.rank, sum)
	if t.rank != 0 {
		return nil
	}
	res, err := t.result()
	if err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	fmt.Println(res)
	return res.Write(file)
}

// open opens the device of this process before it joins the job: the others then do not
// wait for that.
func open() (*device.Device, error) {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return nil, err
	}
	local, _ := strconv.Atoi(os.Getenv("LOCAL_RANK")) // unset: a process without a launcher
	if note != "" && local == 0 {
		log.Print(note)
	}
	return sys.Devices()[local%len(sys.Devices())], nil
}
