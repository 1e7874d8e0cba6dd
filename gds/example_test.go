package gds_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A file is made of device memory, all at once, and a part of it read back.
func ExampleFile() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, err := memory.MakeFrom(s, []float32{1, 2, 3, 4})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	dir, err := os.MkdirTemp("", "chorus")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path, ctx := filepath.Join(dir, "numbers"), context.Background()
	if err := save(ctx, s, path, x); err != nil {
		log.Fatal(err)
	}
	f, err := gds.Open(path, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer f.Close()
	if err := f.Load(ctx, s, x.Slice(0, 2).AsBytes(), 8); err != nil {
		log.Fatal(err)
	}
	out := make([]float32, x.Len())
	if err := x.CopyTo(s, out); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output: [3 4 3 4]
}

func save(ctx context.Context, s *stream.Stream, path string, x memory.Slice[float32]) error {
	f, err := gds.Create(path, nil)
	if err != nil {
		return err
	}
	defer f.Close() // removes the new file unless it was committed
	if err := f.Save(ctx, s, x.AsBytes(), 0); err != nil {
		return err
	}
	return f.Commit(ctx)
}
