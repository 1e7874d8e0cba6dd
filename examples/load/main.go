// Load loads a checkpoint to all devices, sharding each tensor along its first
// dimension. It then saves the tensors as a new checkpoint with as many files, and
// compares the two.
//
//	bin/load model.safetensors.index.json
//
// Without an argument it first creates a small checkpoint with three files.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/tensor"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("load: ")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, paths []string) error {
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
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

// makeCheckpoint saves random matrices in files of at most 4 MiB.
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
	return checkpoint.SaveTensors(ctx, s, path, tensors, &checkpoint.SaveConfig{MaxFileBytes: 4 << 20})
}

// loadAndSave loads a checkpoint with a plan, saves it and compares the result.
func loadAndSave(ctx context.Context, g *comm.Group, second string, paths []string) error {
	ckpt, err := checkpoint.Open(paths, nil)
	if err != nil {
		return err
	}
	defer ckpt.Close()
	ws, err := ckpt.Load(ctx, g, &checkpoint.LoadConfig{Plan: func(t checkpoint.Info) checkpoint.Placement {
		if len(t.Shape) == 0 {
			return checkpoint.Replicate()
		}
		return checkpoint.Shard(0)
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
	if err := checkpoint.Save(ctx, g, second, ws, &checkpoint.SaveConfig{Metadata: ckpt.Metadata(), MaxFileBytes: ckpt.Bytes()/int64(len(ckpt.Status())) + 1}); err != nil {
		return err
	}
	if err := compare(ctx, ckpt, second); err != nil {
		return err
	}
	fmt.Println("saved again: every tensor is equal")
	return nil
}

// compare returns an error unless the saved checkpoint has the same bytes in each tensor.
func compare(ctx context.Context, ckpt *checkpoint.Checkpoint, path string) error {
	if _, err := os.Stat(path + ".index.json"); err == nil {
		path += ".index.json" // a checkpoint with several files
	}
	saved, err := checkpoint.Open([]string{path}, nil)
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
			return fmt.Errorf("the bytes of tensor %q differ after saving", t.Name)
		}
	}
	return nil
}
