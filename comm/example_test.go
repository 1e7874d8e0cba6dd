package comm_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/tensor"
)

func program() error {
	ctx := context.Background()
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.Make[float32](g, 3) // three numbers for each rank of this process
	if err != nil {
		return err
	}
	defer xs.Close()
	for i, x := range xs {
		if err := x.CopyFrom(g.Stream(i), []float32{1, float32(g.Rank() + i), 10}); err != nil {
			return err
		}
	}
	if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
		return err
	}
	if err := g.Wait(ctx); err != nil { // only the host waits here
		return err
	}
	sum := make([]float32, 3)
	if err := xs[0].CopyTo(g.Stream(0), sum); err != nil {
		return err
	}
	fmt.Println(g.Size(), "ranks:", sum)
	return g.Shutdown(ctx)
}

func Example() {
	if err := program(); err != nil {
		log.Fatal(err)
	}
}

// The program of README runs in one process and in several.
func TestProgramOfReadme(t *testing.T) {
	t.Parallel()
	out := initAsProcess(t, "readme", env.Backend.Name+"=virtual")
	require.Contains(t, out, "4 ranks: [4 6 40]\n")
	code, out, _ := job(t, "virtual", "", 3, initVar+"=readme")
	require.Zero(t, code, out)
	require.Equal(t, 3, strings.Count(out, "3 ranks: [3 3 30]\n"), out)
}

// A matrix of the host is divided over four devices by its columns, and put together
// again on one of them.
func ExampleScatter() {
	if err := divide(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [2 2] [2 2] [2 2] [2 1]
	// [0 1 2 3 4 5 6 7 8 9 10 11 12 13]
}

func divide() error {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 4})
	if err != nil {
		return err
	}
	g, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		return err
	}
	defer g.Close()
	x, err := tensor.OfHost([]float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, 2, 7)
	if err != nil {
		return err
	}
	parts, err := comm.Scatter(g, x, &comm.ScatterConfig{Dim: 1})
	if err != nil {
		return err
	}
	for _, p := range parts {
		defer p.Close()
	}
	fmt.Println(parts[0].Shape(), parts[1].Shape(), parts[2].Shape(), parts[3].Shape())
	whole, err := comm.Gather(g, parts, &comm.GatherConfig{Dim: 1, Destination: g.Device(2)})
	if err != nil {
		return err
	}
	defer whole.Close()
	out := make([]float32, 14)
	to, err := tensor.OfHost(out, 2, 7)
	if err != nil {
		return err
	}
	if err := tensor.Copy(g.Stream(2), to, whole); err != nil { // only here the host waits
		return err
	}
	fmt.Println(out)
	return nil
}

// README shows the program above.
func TestReadmeShowsTheExample(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if os.IsNotExist(err) {
		t.Skip("README.md is not here: this is not a checkout")
	}
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(readme), "```go\n")
	block, _, found := strings.Cut(rest, "```")
	require.True(t, found)
	require.Contains(t, string(source), block)
}
