package amp

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// ScalerConfig are the options of NewScaler, with torch's names and defaults. nil means the
// defaults.
type ScalerConfig struct {
	InitScale      float64 // 0 means 65536
	GrowthFactor   float64 // 0 means 2; above 1
	BackoffFactor  float64 // 0 means 0.5; below 1
	GrowthInterval int     // steps without infinities before the scale grows; 0 means 2000
	// Disabled returns a scaler that changes nothing: Step steps, and the factor is 1
	// (enabled=False).
	Disabled bool
}

// maxOptimizers is how many optimisers one scaler can serve.
const maxOptimizers = 64

// A Scaler scales gradients, so that small ones do not vanish in float16 (torch.amp.GradScaler).
// It serves at most 64 open optimisers. A call with a closed optimiser is an error.
type Scaler struct {
	owner   handle.Owner
	graphs  gpu.Graphs // that have captured operations
	cfg     ScalerConfig
	s       *stream.Stream // of the last operation, for Agree
	scale   memory.Slice[float32]
	inverse memory.Slice[float32]
	tracker memory.Slice[int32]
	found   memory.Slice[float32] // by optimiser: not 0 if a gradient was infinite or NaN
	served  []service             // as found; places of closed optimisers are reused
	agreed  bool                  // since the last Update
}

// A service is a scaler's state for one optimiser.
type service struct {
	opt   *optim.Optimizer // nil if the place is free
	stage stage
	found memory.Slice[float32]
	grads *optim.Grads
}

// A stage says what happened to an optimiser since the last Update.
type stage uint8

const (
	ready stage = iota
	checked
	unscaled
	stepped
)

// NewScaler allocates a scaler's numbers on s. The first one on a device loads its kernels, and the driver may wait for
// all work of the device then.
func NewScaler(s *stream.Stream, cfg *ScalerConfig) (*Scaler, error) {
	const op = "new scaler"
	if s == nil {
		return nil, refuse(op, "no stream given")
	}
	c := *cmp.Or(cfg, new(ScalerConfig))
	c.InitScale, c.GrowthFactor = cmp.Or(c.InitScale, 65536), cmp.Or(c.GrowthFactor, 2)
	c.BackoffFactor, c.GrowthInterval = cmp.Or(c.BackoffFactor, 0.5), cmp.Or(c.GrowthInterval, 2000)
	if c.Disabled {
		c.InitScale = 1
	}
	if err := c.check(op); err != nil {
		return nil, err
	}
	if _, err := kernelsOf(s.Device()); err != nil {
		return nil, refuse(op, "%w", err)
	}
	sc := &Scaler{cfg: c, s: s, served: make([]service, 0, maxOptimizers)}
	handle.Init(sc, &sc.owner, handle.About{Kind: "gradient scaler", On: s.Device()})
	if err := sc.allocate(s); err != nil {
		return nil, errors.Join(refuse(op, "%w", err), sc.Close())
	}
	return sc, nil
}

func (c *ScalerConfig) check(op string) error {
	switch {
	case !(float32(c.InitScale) > 0) || math.IsInf(float64(float32(c.InitScale)), 0):
		return refuse(op, "scale %v: want a finite float32 above 0", c.InitScale)
	case !(float32(c.GrowthFactor) > 1) || math.IsInf(float64(float32(c.GrowthFactor)), 0):
		return refuse(op, "growth factor %v: want a finite float32 above 1", c.GrowthFactor)
	case !(float32(c.BackoffFactor) < 1 && float32(c.BackoffFactor) > 0):
		return refuse(op, "backoff factor %v: want a float32 above 0 and below 1", c.BackoffFactor)
	case c.GrowthInterval < 1 || c.GrowthInterval > math.MaxInt32:
		return refuse(op, "growth interval %d: want 1 or more", c.GrowthInterval)
	}
	return nil
}

func (sc *Scaler) allocate(s *stream.Stream) (err error) {
	first := float32(sc.cfg.InitScale)
	if sc.scale, err = memory.MakeFrom(s, []float32{first}); err != nil {
		return err
	}
	if sc.inverse, err = memory.MakeFrom(s, []float32{float32(1 / float64(first))}); err != nil {
		return err
	}
	if sc.tracker, err = memory.MakeFrom(s, []int32{0}); err != nil {
		return err
	}
	sc.found, err = memory.MakeFrom(s, make([]float32, maxOptimizers))
	return err
}

// enter begins an operation on s.
func (sc *Scaler) enter(op string, s *stream.Stream) (*kernels, error) {
	switch {
	case sc == nil || sc.owner.Closed():
		return nil, refuse(op, "the scaler: %w", device.ErrClosed)
	case s == nil:
		return nil, refuse(op, "no stream given")
	case s.Device() != sc.scale.Device():
		return nil, refuse(op, "a stream on %s: the scaler is on %s", s.Device(), sc.scale.Device())
	}
	if err := sc.graphs.Add(gpu.StreamOf(s)); err != nil {
		return nil, refuse(op, "%w", err)
	}
	sc.s = s
	return kernelsOf(s.Device())
}

// enterWith begins an operation on s for an optimiser.
func (sc *Scaler) enterWith(op string, s *stream.Stream, opt *optim.Optimizer) error {
	if _, err := sc.enter(op, s); err != nil {
		return err
	}
	if closed(opt) {
		return refuse(op, "the optimiser: %w", device.ErrClosed)
	}
	return nil
}

// Factor returns the scale: one element of device memory. The backward pass multiplies the
// gradient of the loss by it. A disabled scaler's is 1.
func (sc *Scaler) Factor() memory.Slice[float32] {
	if sc == nil || sc.owner.Closed() {
		return memory.Slice[float32]{}
	}
	return sc.scale
}

// closed reports whether the optimiser is closed or nil: an open one has a group.
func closed(opt *optim.Optimizer) bool { return opt.LR(0).Len() == 0 }

// serve returns the scaler's state for an optimiser, and creates it at the first call.
func (sc *Scaler) serve(op string, s *stream.Stream, opt *optim.Optimizer) (*service, error) {
	for i := range sc.served {
		if sc.served[i].opt == opt {
			return &sc.served[i], nil
		}
	}
	i, err := sc.free(op)
	if err != nil {
		return nil, err
	}
	g, err := opt.Grads(s)
	if err != nil {
		return nil, refuse(op, "%w", err)
	}
	if i == len(sc.served) {
		sc.served = sc.served[:i+1]
	}
	sc.served[i] = service{opt: opt, found: sc.found.Slice(i, i+1), grads: g}
	return &sc.served[i], nil
}

// free returns the first free place. It releases the places of closed optimisers, unless Update
// still needs the result of a check or a graph uses the place.
func (sc *Scaler) free(op string) (int, error) {
	for i := range sc.served {
		v := &sc.served[i]
		if v.opt != nil && v.stage == ready && closed(v.opt) {
			if v.grads.Close() == nil { // otherwise a graph uses the place
				v.opt, v.grads = nil, nil
			}
		}
	}
	if i := slices.IndexFunc(sc.served, func(v service) bool { return v.opt == nil }); i >= 0 {
		return i, nil
	}
	if len(sc.served) == maxOptimizers {
		return 0, refuse(op, "another optimiser: a scaler serves at most %d: close optimisers that are not in use", maxOptimizers)
	}
	return len(sc.served), nil
}

// look checks the gradients of an optimiser, and multiplies them by inverse unless it is the
// zero Slice.
func (sc *Scaler) look(s *stream.Stream, v *service, inverse memory.Slice[float32]) error {
	if err := v.found.Zero(s); err != nil {
		return err
	}
	return v.grads.Unscale(s, inverse, v.found)
}

// Unscale enqueues on s the division of the optimiser's gradients by the scale, and the check
// for infinities and NaN (torch's unscale_), so that they can be clipped before Step. It
// refuses gradients of float16, which Step checks without dividing them in memory, and a
// second call between two updates.
func (sc *Scaler) Unscale(s *stream.Stream, opt *optim.Optimizer) error {
	const op = "unscale"
	v, err := sc.examine(op, s, opt)
	if v == nil || err != nil {
		return err
	}
	for i, g := range opt.Gradients() {
		if g.DType() == memory.Float16 {
			return refuse(op, "gradient %d is float16, which has no room for what unscaling makes of small numbers: keep float32 parameters, or call Step without Unscale, and Check before Agree", i)
		}
	}
	if err := sc.look(s, v, sc.inverse); err != nil {
		return err
	}
	v.stage = unscaled
	return nil
}

// examine returns the service of an optimiser whose gradients were not checked since the last
// Update, or nil if the scaler is disabled.
func (sc *Scaler) examine(op string, s *stream.Stream, opt *optim.Optimizer) (*service, error) {
	if err := sc.enterWith(op, s, opt); err != nil || sc.cfg.Disabled {
		return nil, err
	}
	v, err := sc.serve(op, s, opt)
	if err == nil {
		err = v.fresh(op)
	}
	return v, err
}

// cure says how to begin an iteration.
const cure = "call Update before, or SetScale if a discarded graph capture contained the calls"

// fresh returns an error if the optimiser's gradients were checked since the last Update.
func (v *service) fresh(op string) error {
	switch v.stage {
	case checked:
		return refuse(op, "this optimiser's gradients were checked since the last Update: "+cure)
	case unscaled:
		return refuse(op, "this optimiser's gradients were unscaled since the last Update: "+cure)
	case stepped:
		return refuse(op, "this optimiser has stepped since the last Update: "+cure)
	}
	return nil
}

// Check enqueues on s the check of the optimiser's gradients for infinities and NaN, and leaves
// the gradients as they are. Step does that, too; call Check only if Agree follows and Unscale was
// not called. It takes gradients of all types. A second call between two updates is an error.
func (sc *Scaler) Check(s *stream.Stream, opt *optim.Optimizer) error {
	const op = "check"
	v, err := sc.examine(op, s, opt)
	if v == nil || err != nil {
		return err
	}
	if err := sc.look(s, v, memory.Slice[float32]{}); err != nil {
		return err
	}
	v.stage = checked
	return nil
}

// Step enqueues on s a step of the optimiser, which the device skips if a gradient is
// infinite or NaN. Without a preceding Unscale or Check, Step checks the gradients. Without Unscale, the optimiser
// divides each gradient by the scale when it reads it. The gradients in memory stay scaled.
// cfg may set Clip; the scaler sets GradScale and FoundInf. A second call between two updates
// is an error.
//
// The first Unscale, Check or Step with an optimiser allocates memory, which a graph cannot
// capture: make one iteration before the capture. A graph that has captured Step needs open
// optimiser and scaler as long as it is launched. If the capture is discarded, the scaler stays in
// its iteration: SetScale with the current scale begins a new one.
func (sc *Scaler) Step(s *stream.Stream, opt *optim.Optimizer, cfg *optim.StepConfig) error {
	const op = "step"
	if err := sc.enterWith(op, s, opt); err != nil {
		return err
	}
	if sc.cfg.Disabled {
		return opt.Step(s, cfg)
	}
	c := *cmp.Or(cfg, new(optim.StepConfig))
	if c.GradScale.Len() != 0 || c.FoundInf.Len() != 0 {
		return refuse(op, "GradScale or FoundInf are set: the scaler sets them")
	}
	v, err := sc.serve(op, s, opt)
	if err != nil {
		return err
	}
	switch v.stage {
	case stepped:
		return refuse(op, "this optimiser has stepped since the last Update: "+cure)
	case ready:
		if sc.agreed {
			return refuse(op, "the gradients of this optimiser were not checked before Agree, so ranks could differ: call Unscale or Check before Agree")
		}
		if err := sc.look(s, v, memory.Slice[float32]{}); err != nil {
			return err
		}
		c.GradScale = sc.scale
	case checked:
		c.GradScale = sc.scale
	}
	c.FoundInf = v.found
	if err := opt.Step(s, &c); err != nil {
		return err
	}
	v.stage = stepped
	return nil
}

// looked says whether gradients were checked since the last Update.
func (sc *Scaler) looked() bool {
	return slices.ContainsFunc(sc.served, func(v service) bool { return v.stage != ready })
}

// Update enqueues on s the end of an iteration: if a gradient of any optimiser was infinite or
// NaN, the scale is multiplied by the backoff factor. Otherwise, after GrowthInterval calls in
// a row, it is multiplied by the growth factor, unless that is too large for a float32.
func (sc *Scaler) Update(s *stream.Stream) error {
	const op = "update"
	k, err := sc.enter(op, s)
	if err != nil || sc.cfg.Disabled {
		return err
	}
	if !sc.looked() {
		return refuse(op, "no gradients were checked since the last Update: call Step or Unscale before")
	}
	for i := range sc.served {
		if v := &sc.served[i]; v.stage == ready {
			if err := v.found.Zero(s); err != nil { // what an earlier iteration found
				return err
			}
		}
	}
	c := &sc.cfg
	if err := k.update.Launch(s, one, kernel.Ptr(sc.scale), kernel.Ptr(sc.inverse), kernel.Ptr(sc.tracker), kernel.Ptr(sc.found),
		kernel.Scalar[int32](int32(len(sc.served))), kernel.Scalar[float32](float32(c.GrowthFactor)), kernel.Scalar[float32](float32(c.BackoffFactor)), kernel.Scalar[int32](int32(c.GrowthInterval))); err != nil {
		return err
	}
	sc.restart()
	return nil
}

// SetScale enqueues on s a new scale, and ends the iteration as Update does; the growth
// counter stays (torch's update with new_scale).
func (sc *Scaler) SetScale(s *stream.Stream, scale float64) error {
	const op = "set scale"
	if !(float32(scale) > 0) {
		return refuse(op, "scale %v: want a finite float32 above 0", scale)
	}
	if err := sc.put(op, s, scale, -1); err != nil {
		return err
	}
	sc.restart()
	return nil
}

// restart begins an iteration.
func (sc *Scaler) restart() {
	sc.agreed = false
	for i := range sc.served {
		sc.served[i].stage = ready
	}
}

func (sc *Scaler) put(op string, s *stream.Stream, scale float64, tracker int32) error {
	k, err := sc.enter(op, s)
	if err != nil || sc.cfg.Disabled {
		return err
	}
	if !(scale >= 0) || math.IsInf(float64(float32(scale)), 0) {
		return refuse(op, "scale %v: want a finite float32 of 0 or more", scale)
	}
	return k.put.Launch(s, one, kernel.Ptr(sc.scale), kernel.Ptr(sc.inverse), kernel.Ptr(sc.tracker), kernel.Scalar[float32](float32(scale)), kernel.Scalar[int32](tracker))
}

// Close frees the scaler's device state once pending work on its stream has finished; it does
// not block. While a graph that has captured operations of the scaler is open, Close fails and the scaler stays open. Close does nothing if
// the scaler is nil or closed.
func (sc *Scaler) Close() error {
	if sc == nil || sc.owner.Closed() {
		return nil
	}
	if err := sc.graphs.Refuse("amp: close the scaler on " + sc.s.Device().String()); err != nil {
		return err
	}
	if !sc.owner.Close() {
		return nil
	}
	errs := []error{sc.scale.Close(), sc.inverse.Close(), sc.tracker.Close(), sc.found.Close()}
	for _, v := range sc.served {
		errs = append(errs, v.grads.Close())
	}
	return errors.Join(errs...)
}
