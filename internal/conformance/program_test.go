package conformance

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An outcome is how a program ends.
type outcome string

const (
	succeeds  outcome = "succeeds"
	fails     outcome = "fails"      // a call of Chorus returns an error, or virtual devices report a mistake
	wrongData outcome = "wrong data" // the program finds unexpected data
	hangs     outcome = "hangs"
)

// A program is one case.
type program struct {
	name    string
	area    string
	devices int
	gpu     outcome // on GPUs
	// text is a part of the error or report on virtual devices, unless the program succeeds there. A program that succeeds on
	// the GPUs of the table and has a text is forbidden by NVIDIA's documentation.
	text string
	// forgiven is why virtual devices do not find the mistake; "" if they do.
	forgiven string
	run      func(r *run) error
}

// A run is what a program may use.
type run struct {
	devs []*device.Device
	ctx  context.Context
}

// An unexpected error is one of the program's own checks of data.
type unexpected struct{ error }

func wrong(format string, args ...any) error { return unexpected{fmt.Errorf(format, args...)} }

// programs are all tables.
var programs = slices.Concat(ncclPrograms, kernelPrograms, waitPrograms, memoryPrograms)

// The times after which a program on virtual devices hangs: usually, and if the table expects it.
const (
	virtualLimit = time.Minute
	hangingLimit = 3 * time.Second
)

const (
	caseVariable    = "CHORUS_TEST_FORGIVE" // name of the program that the process runs
	backendVariable = "CHORUS_TEST_FORGIVE_BACKEND"
)

var (
	limit = flag.Duration("limit", 8*time.Second, "time after which a program on CUDA hangs")
	only  = flag.String("only", "", "run only the program with this `name`")
)

// programMain runs one program, in a process of its own.
func programMain(name string) {
	at := slices.IndexFunc(programs, func(p program) bool { return p.name == name })
	err := perform(&programs[at], os.Getenv(backendVariable))
	switch wrong := (unexpected{}); {
	case err == nil:
		fmt.Println(succeeds)
	case errors.As(err, &wrong):
		fmt.Printf("%s\n%v\n", wrongData, err)
	default:
		fmt.Printf("%s\n%v\n", fails, err)
	}
	os.Exit(0) // without the leak checks: programs do not close what they use
}

// perform runs a program in this process.
func perform(p *program, backend string) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: backend, VirtualDevices: p.devices})
	if err != nil {
		return err
	}
	err = p.run(&run{devs: sys.Devices()[:p.devices], ctx: context.Background()})
	if err != nil {
		return err
	}
	for _, d := range sys.Devices()[:p.devices] {
		if err := d.Sync(context.Background()); err != nil {
			return err
		}
	}
	if reports := sys.Reports(); len(reports) > 0 {
		return errors.New(strings.Join(reports, "\n"))
	}
	return nil
}

// mustSucceed reports whether virtual devices have nothing to report.
func (p *program) mustSucceed() bool { return p.gpu == succeeds && p.text == "" || p.forgiven != "" }

// start runs a program in a process of its own.
func start(t *testing.T, p *program, backend string, limit time.Duration) (outcome, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.v=false")
	cmd.Env = append(os.Environ(), caseVariable+"="+p.name, backendVariable+"="+backend)
	if !p.mustSucceed() && p.gpu != wrongData { // otherwise a busy machine that stops the process for a second looks like a deadlock
		cmd.Env = append(cmd.Env, env.VirtualHang.Name+"=1s")
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	if ctx.Err() != nil {
		return hangs, ""
	}
	if err != nil {
		return fails, err.Error() // it crashed
	}
	result, text, _ := strings.Cut(strings.TrimSpace(out.String()), "\n")
	return outcome(result), text
}

func TestPrograms(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		backend := devs[0].System().Backend()
		for i := range programs {
			p := &programs[i]
			if *only != "" && p.name != *only {
				continue
			}
			t.Run(p.name, func(t *testing.T) {
				if backend == "cuda" {
					testgpu.CUDA(t, p.devices)
					got, text := start(t, p, backend, *limit)
					require.Equal(t, p.gpu, got, text)
					return
				}
				t.Parallel()
				limit := virtualLimit
				if p.gpu == hangs && p.text == "" && p.forgiven == "" {
					limit = hangingLimit
				}
				got, text := start(t, p, backend, limit)
				if p.mustSucceed() {
					require.Equal(t, succeeds, got, text)
					return
				}
				if got == hangs && p.gpu == hangs && p.text == "" {
					return // like the GPU, and it would end after a limit of Chorus
				}
				require.Contains(t, []outcome{fails, p.gpu}, got)
				require.NotEmpty(t, p.text)
				require.Contains(t, text, p.text)
			})
		}
	})
}

func TestProgramsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range programs {
		require.False(t, seen[p.name], p.name)
		require.NotEmpty(t, p.area, p.name)
		require.Positive(t, p.devices, p.name)
		seen[p.name] = true
	}
}

func (r *run) stream(i int) (*stream.Stream, error) { return stream.New(r.devs[i], nil) }

// floats allocates n elements with their numbers on device 0.
func floats(s *stream.Stream, n int) (memory.Slice[float32], error) {
	host := make([]float32, n)
	for i := range host {
		host[i] = float32(i)
	}
	return memory.MakeFrom(s, host)
}

// check compares device memory with the values of want.
func check(s *stream.Stream, x memory.Slice[float32], want func(i int) float32) error {
	host := make([]float32, x.Len())
	if err := x.CopyTo(s, host); err != nil {
		return err
	}
	for i, v := range host {
		if v != want(i) {
			return wrong("element %d is %v: want %v", i, v, want(i))
		}
	}
	return nil
}
