// Copy copies memory from the host to a device, to another device, and back.
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
	log.SetPrefix("copy: ")
	if err := roundTrip(); err != nil {
		log.Fatal(err)
	}
}

func roundTrip() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
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
	out := make([]float64, len(in))
	if err := copyOver(a, b, in, out); err != nil {
		return err
	}
	fmt.Printf("%d numbers were copied from the host to %s, to %s and back: equal: %v\n", len(in), first, last, slices.Equal(in, out))
	return nil
}

// copyOver copies in to the device of a, to the device of b, and to out.
func copyOver(a, b *stream.Stream, in, out []float64) error {
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
	if err := b.WaitStream(a); err != nil { // b waits until a has written x
		return err
	}
	if err := x.RecordStream(b); err != nil { // x is not reused before b has read it
		return err
	}
	if err := memory.Copy(b, y, x); err != nil { // to the last device
		return err
	}
	return y.CopyTo(b, out) // and back; returns when out is complete
}
