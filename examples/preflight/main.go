// Preflight checks the GPUs of this host and prints a verdict for each, as an init container of a job does. It
// replaces programs that start all_reduce_perf and parse its text.
//
//	BW_THRESHOLD_GBPS=150 bin/preflight
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/perf"
)

// The exit codes of NVSentinel's checks.
const (
	failed  = 1
	setting = 2
)

func main() { os.Exit(run()) }

func run() int {
	cfg := &perf.CheckConfig{Log: slog.New(slog.NewJSONHandler(os.Stderr, nil))}
	if text, ok := os.LookupEnv("BW_THRESHOLD_GBPS"); ok {
		v, err := strconv.ParseFloat(text, 64)
		if cfg.Limits.AllReduce = v; err != nil || cfg.Limits.Check() != nil {
			fmt.Fprintf(os.Stderr, "BW_THRESHOLD_GBPS is %q: want a number\n", text)
			return setting
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	devs, err := device.All()
	var report *perf.CheckReport
	if err == nil {
		report, err = perf.CheckDevices(ctx, devs, cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return failed
	}
	for _, gpu := range report.GPUs {
		fmt.Printf("%s: healthy %v\n", gpu, len(report.Of(gpu.Rank)) == 0)
	}
	for _, f := range report.Findings {
		fmt.Printf("%s: %s; %s\n", f.Kind, f.Reason, f.Cure)
	}
	if !report.OK() {
		return failed
	}
	return 0
}
