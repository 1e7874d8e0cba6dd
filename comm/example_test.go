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
)

func program() error {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 4})
	if err != nil {
		return err
	}
	g, err := comm.Local(ctx, sys.Devices()...) // one rank on each device
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.Make[float32](g, 3) // three numbers on each
	if err != nil {
		return err
	}
	defer xs.Close()
	for i, x := range xs {
		if err := x.CopyFrom(g.Stream(i), []float32{1, float32(i), 10}); err != nil {
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
	err = xs[0].CopyTo(g.Stream(0), sum)
	fmt.Println(sum)
	return err
}

func Example() {
	if err := program(); err != nil {
		log.Fatal(err)
	}
	// Output: [4 6 40]
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
