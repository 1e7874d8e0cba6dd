package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// startMain measures how long a process takes to its first all-reduce, its first matrix product
// and its first random number. First calls take longer, because drivers and libraries load kernels
// then. It starts itself for each round, because a process has one start, and
// prints the medians in milliseconds. The driver caches compiled kernels in ~/.nv/ComputeCache:
// -cold disables that cache.
func startMain() {
	rounds := flag.Int("rounds", 7, "processes to start")
	cold := flag.Bool("cold", false, "compile kernels again in each process (CUDA_CACHE_DISABLE=1)")
	once := flag.Bool("once", false, "measure this process and print each time")
	flag.Parse()
	if *once {
		if err := measure(context.Background()); err != nil {
			log.Fatal("start: ", err)
		}
		return
	}
	if err := repeat(*rounds, *cold); err != nil {
		log.Fatal("start: ", err)
	}
}

// repeat starts processes and prints the medians of what they print.
func repeat(rounds int, cold bool) error {
	var names []string
	times := map[string][]float64{}
	for range rounds {
		cmd := exec.Command(os.Args[0], "start", "-once")
		cmd.Env = os.Environ()
		if cold {
			cmd.Env = append(cmd.Env, "CUDA_CACHE_DISABLE=1")
		}
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
			name, text, _ := strings.Cut(lines.Text(), "\t")
			ms, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return fmt.Errorf("a process printed %q: %w", lines.Text(), err)
			}
			if times[name] == nil {
				names = append(names, name)
			}
			times[name] = append(times[name], ms)
		}
	}
	for _, name := range names {
		list := times[name]
		slices.Sort(list)
		fmt.Printf("%-36s %9.2f ms  (%.2f to %.2f)\n", name, list[len(list)/2], list[0], list[len(list)-1])
	}
	return nil
}

// measure prints how long each step takes in this process.
func measure(ctx context.Context) error {
	start := time.Now()
	step := func(name string, f func() error) error {
		begin := time.Now()
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Printf("%s\t%.3f\n", name, time.Since(begin).Seconds()*1e3)
		return nil
	}
	var g *comm.Group
	var xs comm.Shards[float32]
	var s *stream.Stream
	err := step("open devices", func() error { _, err := device.All(); return err })
	if err == nil {
		err = step("open a group", func() (err error) { g, err = comm.Local(ctx, nil, nil); return err })
	}
	if err != nil {
		return err
	}
	defer g.Close()
	if err := step("allocate", func() (err error) { xs, err = comm.Make[float32](g, 1<<16); s = g.Stream(0); return err }); err != nil {
		return err
	}
	var ts [3]tensor.Tensor
	for i := range ts {
		if ts[i], err = tensor.Of(xs[0].Slice(i<<14, (i+1)<<14), 128, 128); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"all-reduce", func() error { return errors.Join(comm.AllReduce(g, comm.Sum, xs...), g.Wait(ctx)) }},
		{"product", func() error { return errors.Join(tensor.MatMul(s, ts[0], ts[1], ts[2], nil), s.Sync(ctx)) }},
		{"random number", func() error { return errors.Join(rng.Uniform(nil, s, xs[0], 0, 1), s.Sync(ctx)) }},
		{"strided copy", func() error { return errors.Join(tensor.Copy(s, ts[0], ts[1].T()), s.Sync(ctx)) }},
	} {
		if err := errors.Join(step("first "+c.name, c.call), step("second "+c.name, c.call)); err != nil {
			return err
		}
	}
	fmt.Printf("all steps\t%.3f\n", time.Since(start).Seconds()*1e3)
	return xs.Close()
}
