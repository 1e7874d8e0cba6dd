// Load brings a checkpoint to all devices, each tensor cut along its first dimension,
// saves what the devices have together as a new checkpoint of as many files, and
// compares the two.
//
//	bin/load model.safetensors.index.json
//
// Without an argument it makes a small checkpoint of three files first.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/tensor"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, paths []string) error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		fmt.Fprintln(os.Stderr, "load:", note)
	}
	g, err := comm.Local(ctx, sys.Devices()...)
	if err != nil {
		return err
	}
	defer g.Close()
	folder, err := os.MkdirTemp("", "chorus-load-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if len(paths) == 0 {
		first := filepath.Join(folder, "first.safetensors")
		if err := makeCheckpoint(ctx, g, first); err != nil {
			return err
		}
		paths = []string{first + ".index.json"}
	}
	return loadAndSave(ctx, g, filepath.Join(folder, "second.safetensors"), paths)
}

// makeCheckpoint saves random matrices in files of 4 MiB at most.
func makeCheckpoint(ctx context.Context, g *comm.Group, path string) error {
	s := g.Stream(0)
	gen := rng.Default(s.Device())
	gen.ManualSeed(1)
	tensors := map[string]tensor.Tensor{}
	defer func() {
		for _, x := range tensors {
			x.Close()
		}
	}()
	for i := range 10 {
		x, err := tensor.Make(s, memory.Float32, 512, 512)
		if err != nil {
			return err
		}
		tensors[fmt.Sprintf("layer.%d.weight", i)] = x
		values, err := tensor.Slice[float32](x)
		if err != nil {
			return err
		}
		if err := rng.Normal(gen, s, values, 0, 1); err != nil {
			return err
		}
	}
	return gds.SaveTensors(ctx, s, path, tensors, &gds.SaveConfig{MaxFileBytes: 4 << 20})
}

// loadAndSave loads a checkpoint by a plan, saves it and looks whether it is the same.
func loadAndSave(ctx context.Context, g *comm.Group, second string, paths []string) error {
	ckpt, err := gds.OpenSafetensors(paths...)
	if err != nil {
		return err
	}
	defer ckpt.Close()
	ws, err := ckpt.Load(ctx, g, &gds.LoadConfig{Plan: func(t gds.Info) gds.Placement {
		if len(t.Shape) == 0 {
			return gds.Replicate()
		}
		return gds.Shard(0)
	}})
	if err != nil {
		return err
	}
	defer func() {
		for _, w := range ws {
			w.Close()
		}
	}()
	fmt.Printf("%d tensors of %d bytes on %d devices, %d bytes on the first\n", len(ckpt.Infos()), ckpt.Bytes(), len(ws), ws[0].Bytes())
	if err := gds.Save(ctx, g, second, ws, &gds.SaveConfig{Metadata: ckpt.Metadata(), MaxFileBytes: ckpt.Bytes()/int64(len(ckpt.Status())) + 1}); err != nil {
		return err
	}
	if err := compare(ctx, ckpt, second); err != nil {
		return err
	}
	fmt.Println("saved again: every tensor is equal")
	return nil
}

// compare returns an error unless a saved checkpoint has the same bytes in each tensor.
func compare(ctx context.Context, ckpt *gds.Checkpoint, path string) error {
	if _, err := os.Stat(path + ".index.json"); err == nil {
		path += ".index.json" // it has several files
	}
	saved, err := gds.OpenSafetensors(path)
	if err != nil {
		return err
	}
	defer saved.Close()
	for _, t := range ckpt.Infos() {
		want, err := ckpt.SHA256(ctx, t.Name)
		if err != nil {
			return err
		}
		got, err := saved.SHA256(ctx, t.Name)
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("tensor %q was saved with other bytes", t.Name)
		}
	}
	return nil
}
