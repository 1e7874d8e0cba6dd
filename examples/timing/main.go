// Timing measures work on a device with events. The host's clock would only
// measure the enqueueing.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("timing: ")
	if err := measure(); err != nil {
		log.Fatal(err)
	}
}

func measure() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		return err
	}
	defer s.Close()
	for bytes := 1 << 20; bytes <= 64<<20; bytes *= 8 {
		took, err := copyTime(ctx, s, bytes, 10)
		if err != nil {
			return err
		}
		// A copy within a device reads and writes each byte.
		rate := 2 * float64(bytes) / took.Seconds() / 1e9
		fmt.Printf("%3d MiB copied on %s in %v: %.0f GB/s\n", bytes>>20, s.Device(), took.Round(100*time.Nanosecond), rate)
	}
	return nil
}

// copyTime returns the mean time of consecutive copies.
func copyTime(ctx context.Context, s *stream.Stream, bytes, times int) (time.Duration, error) {
	x, err := memory.Make[uint8](s, bytes)
	if err != nil {
		return 0, err
	}
	defer x.Close()
	y, err := memory.Make[uint8](s, bytes)
	if err != nil {
		return 0, err
	}
	defer y.Close()
	if err := memory.Copy(s, y, x); err != nil { // not timed, because the first use of memory is slower
		return 0, err
	}
	timed := &stream.EventConfig{Timing: true}
	start, err := s.Record(timed)
	if err != nil {
		return 0, err
	}
	defer start.Close()
	for range times {
		if err := memory.Copy(s, y, x); err != nil {
			return 0, err
		}
	}
	end, err := s.Record(timed)
	if err != nil {
		return 0, err
	}
	defer end.Close()
	if err := end.Sync(ctx); err != nil { // wait until the device reaches the event
		return 0, err
	}
	took, err := end.Elapsed(start)
	return took / time.Duration(times), err
}
