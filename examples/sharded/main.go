// Sharded trains the classifier of the ddp example with optimizer state that is
// sharded over the ranks. A ddp.Sharder reduces the gradients to the rank that
// owns them. That rank updates its parameters, and an all-gather distributes
// them. The program uses all devices in one process, or one device in each
// process of a job.
//
//	bin/sharded
//	chorus run --nproc-per-node 4 -- bin/sharded -ckpt run -every 6
//	bin/sharded -ckpt run -resume
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/comm"
)

// A config holds the flags.
type config struct {
	json, ckpt string
	every      int
	resume     bool
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("sharded: ")
	var cfg config
	flag.StringVar(&cfg.json, "json", "", "`file` for the results in JSON")
	flag.StringVar(&cfg.ckpt, "ckpt", "", "`folder` for checkpoints; the last step is saved")
	flag.IntVar(&cfg.every, "every", 0, "`number` of steps from one checkpoint to the next; 0 means that only the last step is saved")
	flag.BoolVar(&cfg.resume, "resume", false, "continues after the newest complete checkpoint in -ckpt, or starts if there is no checkpoint")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &cfg); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, cfg *config) error {
	begun := time.Now()
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	res, err := train(ctx, g, cfg)
	if err != nil {
		return err
	}
	// Shut down together, so that no rank reports another one as lost.
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if g.Rank() != 0 {
		return nil
	}
	fmt.Println(res)
	fmt.Printf("each rank has %d of %d bytes of momenta\n", res.StateBytes, res.ModelBytes)
	return res.Write(cfg.json)
}
