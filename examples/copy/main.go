// Copy moves memory from the host to a device, to another device and back.
package main

import (
	"fmt"
	"log"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func main() {
	log.SetFlags(0)
	if err := roundTrip(); err != nil {
		log.Fatal("copy: ", err)
	}
}

func roundTrip() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print("copy: ", note)
	}
	devs := sys.Devices()
	first, last := devs[0], devs[len(devs)-1]
	a, err := stream.New(first, nil)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := stream.New(last, nil)
	if err != nil {
		return err
	}
	defer b.Close()

	in := make([]float64, 1<<20)
	for i := range in {
		in[i] = float64(i)
	}
	x, err := memory.MakeFrom(a, in) // host to the first device
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := memory.Make[float64](b, len(in))
	if err != nil {
		return err
	}
	defer y.Close()
	if err := b.WaitStream(a); err != nil { // b reads what a has written
		return err
	}
	if err := x.RecordStream(b); err != nil { // and x stays until b has read it
		return err
	}
	if err := memory.Copy(b, y, x); err != nil { // to the last device
		return err
	}
	out := make([]float64, len(in))
	if err := y.CopyTo(b, out); err != nil { // and back; returns when out is filled
		return err
	}
	fmt.Printf("%d numbers went from the host to %s, to %s and back: equal is %v\n", len(in), first, last, slices.Equal(in, out))
	return nil
}
