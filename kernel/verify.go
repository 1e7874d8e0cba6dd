package kernel

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
)

// A Trial is one launch that Verify makes.
type Trial struct {
	Kernel string
	Grid   Grid
	// Args has a value for each parameter. A pointer is a slice of the host, such as []float32,
	// or nil. A number is an int32, a float32 and so on. A Struct is its []byte. Verify copies
	// slices and does not change them. Each argument has separate memory.
	Args []any
	// Outputs are the names, in the source, of pointers whose memory the kernel only writes.
	// Verify poisons the memory and makes the launch twice, with different poison. An element
	// that only one side writes is then a difference.
	Outputs []string
	// Scratch are the names of pointers whose memory may differ after the launch.
	Scratch []string
}

// A Tolerance bounds the difference of two numbers: by Abs, plus Rel times the size of the
// kernel's number, or by ULP units in the last place of the type, if that is more.
type Tolerance struct {
	Abs, Rel float64
	ULP      int
}

// VerifyConfig has the options of Verify.
type VerifyConfig struct {
	// Device runs the kernels; nil means the first GPU of device.Default.
	Device *device.Device
	// Host compiles the source with g++ and runs it on the host, with a fiber for each thread
	// of a block, instead of on a GPU. The source must not include CUDA's headers, and blocks
	// must not wait for each other. Without g++ the error matches exec.ErrNotFound.
	Host bool
	// Tolerances are for the elements of a type. Elements of other types must have the same
	// bits, or both be NaN. GPUs contract a*b+c to one rounding and have other functions
	// than package math, so floats usually need a tolerance.
	Tolerances map[memory.DType]Tolerance
}

// Verify runs kernels of src with equal arguments as CUDA and as their Go functions, and compares
// all memory afterwards. It is for tests. No trials, or a trial without blocks, are an error. The
// Go functions run on a separate virtual device, which reports illegal accesses. Memory around
// each argument detects writes outside of it. cfg may be nil.
//
// If the results differ, the error is a *VerifyError with the first and the worst difference of
// the first trial that fails. Without a GPU the error says so; then set VerifyConfig.Host.
// Verify returns when all launches have completed, or when ctx has ended.
func Verify(ctx context.Context, src *Source, trials []Trial, cfg *VerifyConfig) error {
	if src == nil {
		return errors.New("kernel: verify: no source given")
	}
	if cfg == nil {
		cfg = &VerifyConfig{}
	}
	v := &verification{cfg: cfg, said: declarations(src.CUDA)}
	err := v.run(ctx, src, trials)
	closed := v.close()
	if err == nil { // after an error the virtual device may be lost
		err = closed
	}
	if err != nil {
		return fmt.Errorf("kernel: verify %s: %w", src.Name, err)
	}
	return nil
}

// run validates all trials before it compiles the source, which takes longer.
func (v *verification) run(ctx context.Context, src *Source, trials []Trial) error {
	if len(trials) == 0 {
		return errors.New("no trials given: want at least one")
	}
	all := make([][]testArg, len(trials))
	for i := range trials {
		var err error
		if b := trials[i].Grid.Blocks; b[0] == 0 || b[1] == 0 || b[2] == 0 {
			return fmt.Errorf("trial %d, %s: a grid of %v blocks launches nothing: want 1 or more in each dimension", i, trials[i].Kernel, b)
		}
		if all[i], err = v.arguments(src, &trials[i]); err != nil {
			return fmt.Errorf("trial %d, %s: %w", i, trials[i].Kernel, err)
		}
	}
	if err := v.open(ctx, src); err != nil {
		return err
	}
	for i := range trials {
		if err := v.trial(ctx, &trials[i], all[i]); err != nil {
			return fmt.Errorf("trial %d, %s: %w", i, trials[i].Kernel, err)
		}
	}
	return nil
}

// A verification runs trials on two sides.
type verification struct {
	cfg        *VerifyConfig
	said       map[string][]declared
	cuda, goes side // the source, and the Go functions
	closers    []func() error
}

// A side runs a kernel and updates the memory of its arguments.
type side interface {
	run(ctx context.Context, kernel string, g Grid, args []testArg) error
	String() string
}

func (v *verification) close() error {
	var errs []error
	for i := len(v.closers) - 1; i >= 0; i-- {
		errs = append(errs, v.closers[i]())
	}
	return errors.Join(errs...)
}

// trial makes the launches of one trial and compares them.
func (v *verification) trial(ctx context.Context, tr *Trial, args []testArg) error {
	poisons := []byte{0xff, 0} // NaN, and 0
	if len(tr.Outputs) == 0 {
		poisons = poisons[:1]
	}
	for _, p := range poisons {
		want, got := memoryOf(args, p), memoryOf(args, p)
		if err := v.goes.run(ctx, tr.Kernel, tr.Grid, got); err != nil {
			return fmt.Errorf("%s: %w", v.goes, err)
		}
		if err := v.cuda.run(ctx, tr.Kernel, tr.Grid, want); err != nil {
			return fmt.Errorf("%s: %w", v.cuda, err)
		}
		if e := v.compare(tr.Kernel, want, got); e != nil {
			return e
		}
	}
	return nil
}
