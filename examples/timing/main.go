// Timing measures work on a device with events, which the device itself passes:
// the host's clock would measure how fast work is enqueued.
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
	if err := measure(); err != nil {
		log.Fatal("timing: ", err)
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
		log.Print("timing: ", note)
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
		// A copy within the device reads and writes each byte.
		rate := 2 * float64(bytes) / took.Seconds() / 1e9
		fmt.Printf("%3d MiB copied on %s in %v: %.0f GB/s\n", bytes>>20, s.Device(), took.Round(100*time.Nanosecond), rate)
	}
	return nil
}

// copyTime is the mean time of some copies, one after the other.
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
	if err := memory.Copy(s, y, x); err != nil { // not timed: the first use of memory is slower
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
	if err := end.Sync(ctx); err != nil { // until the device has passed it
		return 0, err
	}
	took, err := end.Elapsed(start)
	return took / time.Duration(times), err
}
