package checkpoint_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// inFolder runs an example with a group of two virtual devices, so that the examples run anywhere,
// and with an empty folder. A program calls comm.Init.
func inFolder(example func(ctx context.Context, g *comm.Group, dir string) error) {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	g, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "chorus")
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(example(ctx, g, dir), g.Close(), os.RemoveAll(dir)); err != nil {
		log.Fatal(err)
	}
}

// write writes a checkpoint with one tensor of shape [2 2].
func write(ctx context.Context, s *stream.Stream, path string, numbers ...float32) error {
	x, err := memory.MakeFrom(s, numbers)
	if err != nil {
		return err
	}
	defer x.Close()
	t, err := tensor.Of(x, 2, 2)
	if err != nil {
		return err
	}
	return checkpoint.SaveTensors(ctx, s, path, map[string]tensor.Tensor{"weight": t}, nil)
}

func ExampleOpen() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		path := filepath.Join(dir, "model.safetensors")
		if err := write(ctx, g.Stream(0), path, 1, 2, 3, 4); err != nil {
			return err
		}
		c, err := checkpoint.Open([]string{path}, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		for _, t := range c.Infos() {
			fmt.Println(t.Name, t.DType, t.Shape, t.Bytes())
		}
		return nil
	})
	// Output: weight float32 [2 2] 16
}

// Each rank gets one column of the matrix.
func ExampleCheckpoint_Load() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		path := filepath.Join(dir, "model.safetensors")
		if err := write(ctx, g.Stream(0), path, 1, 2, 3, 4); err != nil {
			return err
		}
		c, err := checkpoint.Open([]string{path}, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		weights, err := c.Load(ctx, g, &checkpoint.LoadConfig{
			Plan: func(checkpoint.Info) checkpoint.Placement { return checkpoint.Shard(1) },
		})
		if err != nil {
			return err
		}
		for i, w := range weights {
			defer w.Close()
			column, err := checkpoint.Get[float32](w, "weight", 2, 1)
			if err != nil {
				return err
			}
			out := make([]float32, column.Len())
			if err := column.CopyTo(g.Stream(i), out); err != nil {
				return err
			}
			fmt.Println("rank", i, "has", out)
		}
		return nil
	})
	// Output:
	// rank 0 has [1 3]
	// rank 1 has [2 4]
}

// The type of the elements changes on the way to the device.
func ExampleCheckpoint_LoadOn() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		path := filepath.Join(dir, "model.safetensors")
		if err := write(ctx, g.Stream(0), path, 1, 2, 3, 4); err != nil {
			return err
		}
		c, err := checkpoint.Open([]string{path}, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		w, err := c.LoadOn(ctx, g.Stream(0), &checkpoint.LoadConfig{
			DType: func(checkpoint.Info) memory.DType { return memory.BFloat16 },
		})
		if err != nil {
			return err
		}
		defer w.Close()
		x, err := checkpoint.Get[memory.BFloat16Bits](w, "weight")
		if err != nil {
			return err
		}
		out := make([]memory.BFloat16Bits, x.Len())
		err = x.CopyTo(g.Stream(0), out)
		fmt.Println(x.DType(), out)
		return err
	})
	// Output: bfloat16 [1 2 3 4]
}

func ExampleCompare() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		var both []*checkpoint.Checkpoint
		for i, last := range []float32{4, 4.5} {
			path := filepath.Join(dir, fmt.Sprint(i, ".safetensors"))
			if err := write(ctx, g.Stream(0), path, 1, 2, 3, last); err != nil {
				return err
			}
			c, err := checkpoint.Open([]string{path}, nil)
			if err != nil {
				return err
			}
			defer c.Close()
			both = append(both, c)
		}
		list, err := checkpoint.Compare(ctx, both[0], both[1])
		for _, d := range list {
			fmt.Println(d.Name, d.Elements, d.First, d.MaxAbs)
		}
		return err
	})
	// Output: weight 1 [1 1] 0.5
}

// part returns memory of two numbers on each rank, rows of a tensor of four.
func part(g *comm.Group, numbers []float32) (xs comm.Shards[float32], parts [][]checkpoint.Part, err error) {
	if xs, err = comm.Make[float32](g, 2); err != nil {
		return nil, nil, err
	}
	for i, x := range xs {
		if err := x.CopyFrom(g.Stream(i), numbers[2*i:2*i+2]); err != nil {
			return xs, nil, err
		}
		t, err := tensor.Of(x, 2)
		if err != nil {
			return xs, nil, err
		}
		parts = append(parts, []checkpoint.Part{{Name: "weight", Data: t, Shape: []int{4}, Start: 2 * i}})
	}
	return xs, parts, nil
}

// The training continues while other goroutines write the files.
func ExampleNewSaver() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		xs, parts, err := part(g, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer xs.Close()
		saver, err := checkpoint.NewSaver(ctx, g, dir, parts, &checkpoint.SaverConfig{KeepLast: 2})
		if err != nil {
			return err
		}
		for step := int64(100); step <= 300; step += 100 {
			if err := errors.Join(saver.Save(ctx, step, g.Streams()), saver.Wait(ctx)); err != nil {
				return errors.Join(err, saver.Close())
			}
		}
		list, err := checkpoint.List(dir)
		for _, folder := range list {
			fmt.Println(filepath.Base(folder))
		}
		return errors.Join(err, saver.Close())
	})
	// Output:
	// step-00000200
	// step-00000300
}

// A job continues after its newest complete checkpoint.
func ExampleLatest() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		xs, parts, err := part(g, []float32{1, 2, 3, 4})
		if err != nil {
			return err
		}
		defer xs.Close()
		saver, err := checkpoint.NewSaver(ctx, g, dir, parts, nil)
		if err != nil {
			return err
		}
		if err := errors.Join(saver.Save(ctx, 100, g.Streams()), saver.Close()); err != nil {
			return err
		}
		for i, x := range xs { // the memory of a process that has just started
			if err := x.Zero(g.Stream(i)); err != nil {
				return err
			}
		}
		saved, skipped, err := checkpoint.Latest(ctx, g, dir)
		if err != nil {
			return err
		}
		defer saved.Close()
		if _, err := saved.Restore(ctx, g, parts, nil); err != nil {
			return err
		}
		out := make([]float32, 2)
		err = xs[1].CopyTo(g.Stream(1), out)
		fmt.Println("step", saved.Step(), "skipped", len(skipped), "rank 1 has", out)
		return err
	})
	// Output: step 100 skipped 0 rank 1 has [3 4]
}

// Weights that were loaded in parts are saved as whole tensors, each byte by one rank.
func ExampleSave() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		from, to := filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "copy.safetensors")
		if err := write(ctx, g.Stream(0), from, 1, 2, 3, 4); err != nil {
			return err
		}
		c, err := checkpoint.Open([]string{from}, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		weights, err := c.Load(ctx, g, &checkpoint.LoadConfig{
			Plan: func(checkpoint.Info) checkpoint.Placement { return checkpoint.Shard(0) },
		})
		if err != nil {
			return err
		}
		for _, w := range weights {
			defer w.Close()
		}
		if err := checkpoint.Save(ctx, g, to, weights, nil); err != nil {
			return err
		}
		saved, err := checkpoint.Open([]string{to}, nil)
		if err != nil {
			return err
		}
		defer saved.Close()
		differences, err := checkpoint.Compare(ctx, c, saved)
		fmt.Println("differences:", len(differences))
		return err
	})
	// Output: differences: 0
}

// A checkpoint gets another number of files, on the host.
func ExampleReshard() {
	inFolder(func(ctx context.Context, g *comm.Group, dir string) error {
		from, to := filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "resharded")
		if err := write(ctx, g.Stream(0), from, 1, 2, 3, 4); err != nil {
			return err
		}
		if err := checkpoint.Reshard(ctx, from, to, &checkpoint.ReshardConfig{Files: 1}); err != nil {
			return err
		}
		saved, err := checkpoint.OpenSaved(to)
		if err != nil {
			return err
		}
		defer saved.Close()
		fmt.Println(saved.Files(), "file,", saved.Bytes(), "bytes, digests:", saved.Verify(ctx))
		return nil
	})
	// Output: 1 file, 16 bytes, digests: <nil>
}
