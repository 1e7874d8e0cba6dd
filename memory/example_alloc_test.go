package memory_test

import (
	"bytes"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// virtualStream is for the examples below.
func virtualStream() *stream.Stream {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	return s
}

// Memory that is freed is cached, in segments of the driver, and used again.
func ExampleStatsOf() {
	s := virtualStream()
	defer s.Close()
	x, err := memory.Make[float32](s, 1000)
	if err != nil {
		log.Fatal(err)
	}
	show := func() {
		stats, err := memory.StatsOf(s.Device())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(stats.RequestedBytes.All.Current, stats.AllocatedBytes.All.Current, stats.ReservedBytes.All.Current,
			stats.Flat()["allocated_bytes.small_pool.peak"])
	}
	show()
	if err := x.Close(); err != nil {
		log.Fatal(err)
	}
	show()
	if err := memory.EmptyCache(s.Device()); err != nil {
		log.Fatal(err)
	}
	show()
	// Output:
	// 4000 4096 2097152 4096
	// 0 0 2097152 4096
	// 0 0 0 4096
}

// A pool keeps the memory of one purpose apart.
func ExamplePool_Use() {
	s := virtualStream()
	defer s.Close()
	pool := memory.NewPool(nil)
	defer pool.Close()
	err := pool.Use(s, func() error {
		x, err := memory.Make[byte](s, 1000)
		if err != nil {
			return err
		}
		defer x.Close()
		fmt.Println(pool.Allocated(), pool.Reserved())
		return nil
	})
	fmt.Println(err)
	// Output:
	// 1024 2097152
	// <nil>
}

// Raw memory is an address, for code that keeps its own books.
func ExampleAllocRaw() {
	s := virtualStream()
	defer s.Close()
	ptr, err := memory.AllocRaw(s, 1000)
	if err != nil {
		log.Fatal(err)
	}
	if err := memory.FreeRaw(s.Device(), ptr); err != nil {
		log.Fatal(err)
	}
	err = memory.FreeRaw(s.Device(), ptr)
	var wrong *memory.PointerError
	fmt.Println(errors.As(err, &wrong), wrong.Address == ptr)
	// Output: true true
}

// A snapshot shows every block and what has happened. Its pickle is for
// pytorch.org/memory_viz.
func ExampleTakeSnapshot() {
	s := virtualStream()
	defer s.Close()
	if err := memory.RecordHistory(s.Device(), &memory.HistoryConfig{Entries: 100000, Stacks: true}); err != nil {
		log.Fatal(err)
	}
	x, err := memory.Make[float32](s, 1000)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	snap, err := memory.TakeSnapshot(s.Device())
	if err != nil {
		log.Fatal(err)
	}
	for _, b := range snap.Segments[0].Blocks {
		fmt.Println(b.State, b.RequestedSize, b.Size)
	}
	for _, e := range snap.Traces[0] {
		fmt.Println(e.Action, e.Size)
	}
	var file bytes.Buffer
	if err := snap.WritePickle(&file); err != nil {
		log.Fatal(err)
	}
	// Output:
	// active_allocated 4000 4096
	// inactive 0 2093056
	// segment_alloc 2097152
	// alloc 4000
	// snapshot 4096
}

// The process may have half of the device, as torch would with
// set_per_process_memory_fraction(0.5).
func ExampleSetFraction() {
	s := virtualStream()
	defer s.Close()
	if err := memory.SetFraction(s.Device(), 0.5); err != nil {
		log.Fatal(err)
	}
	_, total, err := s.Device().MemoryInfo()
	if err != nil {
		log.Fatal(err)
	}
	_, err = memory.Alloc(s, int(total/2)+2<<20)
	var oom *memory.OutOfMemoryError
	fmt.Println(errors.As(err, &oom), oom.Fraction, oom.Reserved)
	// Output: true 0.5 0
}
