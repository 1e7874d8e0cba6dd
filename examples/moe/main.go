// Moe trains a mixture of experts. A router sends each token to two of eight experts, which are divided
// among the ranks: the rows of the tokens travel to the experts and back, forward and backward. The loss
// is the same on 1, 2, 4 and 8 ranks, each a process with one device.
//
//	bin/moe
//	chorus run --nproc-per-node 4 -- bin/moe -steps 50
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"syscall"

	"github.com/gochorus/chorus/comm"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("moe: ")
	steps := flag.Int("steps", 20, "`number` of steps")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *steps); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, steps int) error {
	g, err := comm.Init(ctx, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	losses, err := train(ctx, g, steps)
	if err != nil {
		return err
	}
	for i, loss := range losses {
		if g.Rank() == 0 && (i%5 == 0 || i == steps-1) {
			log.Printf("step %d: loss %.5f", i, loss)
		}
	}
	return g.Shutdown(ctx)
}
