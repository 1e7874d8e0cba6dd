// Hello adds one number from each device with an all-reduce. It uses all devices in one
// process, or one device in each process of a job.
//
//	bin/hello
//	chorus run --nproc-per-node 4 -- bin/hello
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/comm"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("hello: ")
	if err := hello(); err != nil {
		log.Fatal(err)
	}
}

func hello() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.Make[float32](g, 1)
	if err != nil {
		return err
	}
	defer xs.Close()
	for i, x := range xs {
		if err := x.CopyFrom(g.Stream(i), []float32{float32(g.Rank() + i + 1)}); err != nil {
			return err
		}
	}
	if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
		return err
	}
	if err := g.Wait(ctx); err != nil {
		return err
	}
	for i, x := range xs {
		sum := make([]float32, 1)
		if err := x.CopyTo(g.Stream(i), sum); err != nil {
			return err
		}
		fmt.Printf("%s: 1 + ... + %d = %g\n", g.Device(i), g.Size(), sum[0])
	}
	return g.Shutdown(ctx)
}
