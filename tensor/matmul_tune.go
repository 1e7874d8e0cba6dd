package tensor

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// TuneConfig are the options of tuning matrix products; nil means their defaults, which are
// torch's where torch has them.
type TuneConfig struct {
	// MaxDuration limits the last measurement of each algorithm
	// (torch.cuda.tunable.set_max_tuning_duration). Default 30 ms.
	MaxDuration time.Duration
	// MaxIterations limits the products in that measurement
	// (set_max_tuning_iterations). Default 100.
	MaxIterations int
	// Candidates is the largest number of algorithms to measure. Default 32.
	Candidates int
	// RotatingBytes is the size of the copies of the operands that are used in turns, so that
	// they are not in the cache (set_rotating_buffer_size). Default 64 MiB; -1 means one copy.
	RotatingBytes int64
	// NumericalCheck drops algorithms whose results differ from the default's by more than
	// ATol + RTol·|result| (set_numerical_check_tolerances). The default tolerances are 1e-5.
	NumericalCheck bool
	ATol, RTol     float64
}

// A TuneResult is the outcome of tuning one product.
type TuneResult struct {
	Op, Params    string        // the product in the terms of cuBLASLt, as in files of results
	Solution      string        // the algorithm, or "Default"
	Time, Default time.Duration // of one product, with Solution and without tuning; Default is 0 in results of files
	Measured      int           // algorithms that were measured
	Dropped       int           // algorithms that failed, or had other results
}

func tuneOptions(cfg *TuneConfig) (*gemm.TuneOptions, error) {
	var c TuneConfig
	if cfg != nil {
		c = *cfg
	}
	if c.MaxDuration < 0 || c.MaxIterations < 0 || c.Candidates < 0 || c.RotatingBytes < -1 {
		return nil, fmt.Errorf("tensor: tune: MaxDuration is %v, MaxIterations %d, Candidates %d and RotatingBytes %d: they must not be negative, except that RotatingBytes may be -1", c.MaxDuration, c.MaxIterations, c.Candidates, c.RotatingBytes)
	}
	if !(c.ATol >= 0 && c.RTol >= 0) { // also if one is NaN
		return nil, fmt.Errorf("tensor: tune: ATol is %v and RTol is %v: want 0 or more", c.ATol, c.RTol)
	}
	o := &gemm.TuneOptions{Duration: 30 * time.Millisecond, Iterations: 100, Candidates: 32, Rotating: 64 << 20, Check: c.NumericalCheck, ATol: 1e-5, RTol: 1e-5}
	if c.MaxDuration > 0 {
		o.Duration = c.MaxDuration
	}
	if c.MaxIterations > 0 {
		o.Iterations = c.MaxIterations
	}
	if c.Candidates > 0 {
		o.Candidates = c.Candidates
	}
	if c.RotatingBytes != 0 {
		o.Rotating = max(0, c.RotatingBytes)
	}
	if c.ATol > 0 || c.RTol > 0 {
		o.ATol, o.RTol = c.ATol, c.RTol
	}
	return o, nil
}

// TuneMatMul measures the algorithms of cuBLASLt for the product that MatMul would enqueue
// with the same arguments, and uses the fastest one for such products on the device from now
// on. It measures copies of the operands on s and writes neither c nor another output. A
// product that was tuned before is not measured again. The host waits for the stream. If ctx
// ends first, TuneMatMul returns its cause and changes nothing.
func TuneMatMul(ctx context.Context, s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig, tune *TuneConfig) (TuneResult, error) {
	const op = "tensor: tune"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return TuneResult{}, err
	}
	o, err := tuneOptions(tune)
	if err != nil {
		return TuneResult{}, err
	}
	if cfg == nil {
		cfg = &noConfig
	}
	var m multiplication
	if err := m.set(s, &c, &a, &b, cfg); err != nil {
		return TuneResult{}, matMulError(s, c, a, b, err)
	}
	if m.empty() {
		return TuneResult{}, matMulError(s, c, a, b, fmt.Errorf("a product without elements has no algorithm"))
	}
	r, err := gemm.Tune(ctx, s, &m.Product, o)
	if err != nil {
		return TuneResult{}, matMulError(s, c, a, b, err)
	}
	return TuneResult(r), nil
}

// SetMatMulTuning makes every product of the process be tuned at its first use, except during
// captures (torch.cuda.tunable.enable, tuning_enable); nil turns that off. The first MatMul of
// a kind then waits for its stream. If a tuning fails, the default algorithm is used.
func SetMatMulTuning(tune *TuneConfig) error {
	if tune == nil {
		gemm.SetOnline(nil)
		return nil
	}
	o, err := tuneOptions(tune)
	if err == nil {
		gemm.SetOnline(o)
	}
	return err
}

// TuneResults returns the results of a device, of this process and of files
// (torch.cuda.tunable.get_results).
func TuneResults(dev *device.Device) ([]TuneResult, error) {
	list, err := gemm.Results(dev)
	out := make([]TuneResult, len(list))
	for i, r := range list {
		out[i] = TuneResult(r)
	}
	return out, err
}

// WriteTuneResults writes the results of a device in torch's format
// (torch.cuda.tunable.write_file): lines "Validator,KEY,VALUE" with the version of cuBLASLt,
// the device and the workspace, and a line "Op,Params,Solution,milliseconds" for each product.
func WriteTuneResults(dev *device.Device, w io.Writer) error {
	if err := gemm.WriteResults(dev, w); err != nil {
		return fmt.Errorf("tensor: write tune results: %w", err)
	}
	return nil
}

// ReadTuneResults reads results for a device, which products use from now on
// (torch.cuda.tunable.read_file). A file with other validators, or an invalid line, is an
// error and changes nothing. An algorithm that cuBLASLt does not accept for its product is
// ignored. Results that the device already has stay.
func ReadTuneResults(dev *device.Device, r io.Reader) error {
	if err := gemm.ReadResults(dev, r); err != nil {
		return fmt.Errorf("tensor: read tune results: %w", err)
	}
	return nil
}

// RecordMatMuls records the products of a device that were not tuned, until stop
// (torch.cuda.tunable.record_untuned_enable). stop writes a line for each kind of product, for
// TuneRecorded. A second call of stop is an error and writes nothing.
func RecordMatMuls(dev *device.Device) (stop func(w io.Writer) error, err error) {
	if stop, err = gemm.Record(dev); err != nil {
		return nil, fmt.Errorf("tensor: record matmuls of %s: %w", dev, err)
	}
	return stop, nil
}

// TuneRecorded tunes the products that RecordMatMuls has written, on random operands that it
// allocates on s (torch.cuda.tunable.tune_gemm_in_file). The host waits for the stream. It
// stops at the first product that cannot be tuned, and returns the results so far.
func TuneRecorded(ctx context.Context, s *stream.Stream, r io.Reader, tune *TuneConfig) ([]TuneResult, error) {
	const op = "tensor: tune recorded"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return nil, err
	}
	o, err := tuneOptions(tune)
	if err != nil {
		return nil, err
	}
	list, err := gemm.TuneRecorded(ctx, s, r, o)
	out := make([]TuneResult, len(list))
	for i, r := range list {
		out[i] = TuneResult(r)
	}
	if err != nil {
		err = fmt.Errorf("%s on %s: %w", op, s.Device(), err)
	}
	return out, err
}
