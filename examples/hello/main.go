// Hello adds one number from each device of this machine, on all of them.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

func main() {
	log.SetFlags(0)
	if err := hello(); err != nil {
		log.Fatal("hello: ", err)
	}
}

func hello() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print("hello: ", note)
	}
	g, err := comm.Local(ctx, sys.Devices()...)
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
		if err := x.CopyFrom(g.Stream(i), []float32{float32(i + 1)}); err != nil {
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
	return nil
}
