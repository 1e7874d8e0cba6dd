package gds_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// withMemory runs an example with the name of a new file and four bytes of a virtual device.
func withMemory(example func(ctx context.Context, path string, s *stream.Stream, x memory.Slice[byte]) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s := stream.Default(sys.Devices()[0])
	x, err := memory.MakeFrom(s, []byte("abcd"))
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "chorus")
	if err != nil {
		log.Fatal(err)
	}
	err = example(context.Background(), filepath.Join(dir, "data"), s, x)
	if err := errors.Join(err, x.Close(), os.RemoveAll(dir)); err != nil {
		log.Fatal(err)
	}
}

// The file appears under its name when it is complete.
func ExampleCreate() {
	withMemory(func(ctx context.Context, path string, s *stream.Stream, x memory.Slice[byte]) error {
		f, err := gds.Create(path, nil)
		if err != nil {
			return err
		}
		defer f.Close() // without Commit, it removes the file
		if _, err := f.WriteAt(ctx, s, x, 2); err != nil {
			return err
		}
		_, before := os.Stat(path)
		if err := f.Commit(ctx); err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		fmt.Printf("%v %q\n", errors.Is(before, os.ErrNotExist), text)
		return err
	})
	// Output: true "\x00\x00abcd"
}

func ExampleOpen() {
	withMemory(func(ctx context.Context, path string, s *stream.Stream, x memory.Slice[byte]) error {
		if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
			return err
		}
		f, err := gds.Open(path, nil)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := f.ReadAt(ctx, s, x, 5)
		if err != nil {
			return err
		}
		out := make([]byte, x.Len())
		err = x.CopyTo(s, out)
		fmt.Printf("%d bytes: %s\n", n, out)
		return err
	})
	// Output: 4 bytes: 5678
}
