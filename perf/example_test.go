package perf_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/perf"
)

// faulty opens virtual devices whose third device receives wrong data. A tool opens device.All instead.
func faulty() []*device.Device {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 4, Faults: "wrong@ncclRecv:2#*"})
	if err != nil {
		log.Fatal(err)
	}
	return sys.Devices()
}

func ExampleCheckDevices() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	report, err := perf.CheckDevices(ctx, faulty(), nil)
	if err != nil {
		log.Fatal(err)
	}
	for rank := range report.GPUs {
		if len(report.Of(rank)) == 0 {
			fmt.Println("GPU", rank, "is healthy")
		}
		for _, f := range report.Of(rank) {
			fmt.Println("GPU", rank, "is", f.Kind, "in", f.Step)
		}
	}
	// Output:
	// GPU 0 is healthy
	// GPU 1 is healthy
	// GPU 2 is wrong in pairs
	// GPU 3 is healthy
}

func ExampleRun() {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	group, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer group.Close()
	plan := &perf.Plan{Operations: []string{"all_reduce"}, MinBytes: 1 << 10, MaxBytes: 4 << 10, StepFactor: 2, Iterations: 5, Checks: 1}
	report, err := perf.Run(ctx, group, plan, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, row := range report.Rows {
		fmt.Println(row.Operation, row.Bytes, "bytes,", row.Count, "elements,", *row.OutOfPlace.Wrong, "wrong,", len(row.OutOfPlace.Ranks), "ranks")
	}
	// Output:
	// all_reduce 1024 bytes, 256 elements, 0 wrong, 2 ranks
	// all_reduce 2048 bytes, 512 elements, 0 wrong, 2 ranks
	// all_reduce 4096 bytes, 1024 elements, 0 wrong, 2 ranks
}
