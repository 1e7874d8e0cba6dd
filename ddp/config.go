package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
)

// ReducerConfig are the options of NewReducer; nil means their defaults. They
// must be the same on all ranks.
type ReducerConfig struct {
	// BucketBytes is the most bytes of gradients that are reduced together. A larger
	// gradient gets a bucket for itself. Default 25 MiB, as in torch's
	// DistributedDataParallel.
	BucketBytes int
	// FirstBucketBytes is BucketBytes for the bucket that is ready first.
	// Default 1 MiB.
	FirstBucketBytes int
	// Op is the reduction. Default Avg, the mean over the ranks; use Sum when
	// each rank has weighted its gradients already, as ranks with unequal parts
	// of a batch must.
	Op *comm.Op
	// FindUnused lets a rank leave gradients out of a step (find_unused_parameters).
	// A gradient that is not Ready by Finish counts as zeros. If no rank used a
	// gradient, it keeps its value; if any rank used it, all ranks get the result. A
	// small reduction at the end of each step tells the devices, and the host does not
	// wait. Only for Sum and Avg. Default off: Finish returns an error for such a
	// gradient.
	FindUnused bool
	// StaticGraph is FindUnused for programs that use the same gradients in every step
	// (static_graph). The gradients may differ from rank to rank. The first step tells
	// which are used; Ready or Finish returns an error for a later step that differs.
	StaticGraph bool
	// Compress is the type of float32 and float64 gradients on the wire:
	// memory.Float16 or memory.BFloat16 (fp16_compress_hook, bf16_compress_hook).
	// Avg divides before the conversion, so that sums stay in the range of a float16.
	// Default none.
	Compress memory.DType
	// Hook reduces the buckets instead of an all-reduce. Default none. With Compress, it gets
	// the buckets in that type (fp16_compress_wrapper, bf16_compress_wrapper); PowerSGD then
	// is an all-reduce. Only for Sum and Avg, and gradients of floats of 16 bits or more.
	Hook Hook
	// Uneven lets ranks have different numbers of steps (torch's Join): a rank without input
	// calls Reducer.Join, and its gradients count as zeros. A local rank may also have no ready
	// gradients in a step while other local ranks have. A small reduction at the beginning of
	// each step counts the ranks that have gradients. Only for Sum and Avg.
	Uneven bool
	// DivideByActive lets Avg divide by the ranks that have gradients in the step
	// (divide_by_initial_world_size=False), instead of all ranks. It needs Uneven. The factor
	// is applied on the device, before the reduction.
	DivideByActive bool
	// StopTogether lets Finish, and Join, return an error on all ranks as soon as one rank has
	// no input (throw_on_early_termination). It needs Uneven. Finish then waits until all ranks
	// have begun the step.
	StopTogether bool
	// Verify lets Finish wait for the step on all ranks and compare it. Finish returns an error
	// on all ranks, so that none updates its parameters, if on one rank a gradient is missing,
	// or an element is infinite or NaN before the reduction. A graph cannot capture such a step.
	// Default off: only the rank without the gradient gets an error, and numbers that are not
	// finite reach all ranks.
	Verify bool
	// Autotune chooses the size of buckets and the group by the times of the first steps. It excludes Hook, whose
	// state belongs to buckets. Default none.
	Autotune *Autotune
}

// filled checks the options for gradients of the given types, and puts in the defaults.
func filled(cfg *ReducerConfig, types []memory.DType) (ReducerConfig, error) {
	c := *cmp.Or(cfg, new(ReducerConfig))
	var err error
	if c.BucketBytes, c.FirstBucketBytes, err = bucketSizes(c.BucketBytes, c.FirstBucketBytes); err != nil {
		return c, fmt.Errorf("ddp: new reducer: %w", err)
	}
	if c.Op == nil {
		c.Op = new(comm.Avg)
	}
	if !slices.ContainsFunc(types, func(t memory.DType) bool { return t != c.Compress }) {
		c.Compress = memory.Invalid
	}
	for _, check := range []func([]memory.DType) error{c.checkUnused, c.checkUneven, c.checkHook, c.checkCompress} {
		if err := check(types); err != nil {
			return c, err
		}
	}
	return c, nil
}

// checkUneven checks the options for uneven inputs.
func (c *ReducerConfig) checkUneven(types []memory.DType) error {
	switch {
	case !c.Uneven && (c.DivideByActive || c.StopTogether):
		return errors.New("ddp: new reducer: DivideByActive and StopTogether are for uneven inputs: set Uneven")
	case !c.Uneven:
		return nil
	case *c.Op != comm.Sum && *c.Op != comm.Avg:
		return fmt.Errorf("ddp: new reducer: %v of uneven inputs: the zeros that stand for them need sum or avg", *c.Op)
	case c.DivideByActive && *c.Op != comm.Avg:
		return fmt.Errorf("ddp: new reducer: DivideByActive with %v, which does not divide: want avg", *c.Op)
	}
	return onlyFloats("uneven inputs for gradients", types)
}

// checkHook checks the options for hooks.
func (c *ReducerConfig) checkHook(types []memory.DType) error {
	if c.Hook == nil {
		return nil
	}
	if *c.Op != comm.Sum && *c.Op != comm.Avg {
		return fmt.Errorf("ddp: new reducer: %v by a hook: want sum or avg", *c.Op)
	}
	if x, ok := c.Hook.(interface{ check() error }); ok {
		if err := x.check(); err != nil {
			return fmt.Errorf("ddp: new reducer: %w", err)
		}
	}
	return onlyFloats("a hook for gradients", types)
}

// describeHook names the hook, with its options if it has a String method.
func (c *ReducerConfig) describeHook() string {
	switch h := c.Hook.(type) {
	case nil:
		return ""
	case fmt.Stringer:
		return fmt.Sprintf(", by the hook %s", h)
	default:
		return fmt.Sprintf(", by a hook %T", h)
	}
}

// checkUnused checks the options for unused gradients.
func (c *ReducerConfig) checkUnused(types []memory.DType) error {
	if !c.FindUnused && !c.StaticGraph {
		return nil
	}
	if *c.Op == comm.Prod || *c.Op == comm.Max || *c.Op == comm.Min {
		return fmt.Errorf("ddp: new reducer: %v with unused gradients: the zeros that stand for them need sum or avg", *c.Op)
	}
	return onlyFloats("unused gradients", types)
}

// onlyFloats returns an error if one of the types is not a float of 16 bits or more.
func onlyFloats(what string, types []memory.DType) error {
	for _, t := range types {
		if !isFloat(t) {
			return fmt.Errorf("ddp: new reducer: %s of %s: want floats of 16 bits or more", what, t)
		}
	}
	return nil
}

// checkCompress checks the type on the wire.
func (c *ReducerConfig) checkCompress(types []memory.DType) error {
	switch {
	case c.Compress == memory.Invalid:
		return nil
	case c.Compress != memory.Float16 && c.Compress != memory.BFloat16:
		return fmt.Errorf("ddp: new reducer: gradients reduced in %s: want memory.Float16 or memory.BFloat16", c.Compress)
	case !slices.ContainsFunc(types, compressible):
		return fmt.Errorf("ddp: new reducer: gradients of %s reduced in %s: want float32 or float64", types[0], c.Compress)
	case *c.Op > comm.Avg:
		return fmt.Errorf("ddp: new reducer: gradients reduced in %s by %v: a factor of another type: want sum, avg, max, min or prod", c.Compress, *c.Op)
	}
	return nil
}

// bucketSizes puts in the defaults.
func bucketSizes(bytes, first int) (int, int, error) {
	if bytes < 0 || first < 0 {
		return 0, 0, fmt.Errorf("buckets of %d and %d bytes: want a positive size", first, bytes)
	}
	if bytes == 0 {
		bytes = 25 << 20
	}
	if first == 0 {
		first = min(1<<20, bytes)
	}
	return bytes, first, nil
}

// An argumentError is the error of a wrong argument. It matches comm.ErrMismatch.
type argumentError struct{ err error }

func (e *argumentError) Error() string { return e.err.Error() }

// Unwrap returns comm.ErrMismatch and the cause, for errors.Is.
func (e *argumentError) Unwrap() []error { return []error{comm.ErrMismatch, e.err} }

// refuse returns the error of a wrong argument of op.
func refuse(op, format string, args ...any) error {
	return unfit(fmt.Errorf("ddp: %s: "+format, append([]any{op}, args...)...))
}

// unfit wraps another package's error about a wrong argument.
func unfit(err error) error { return &argumentError{err} }

// checkGroup returns an error if a reducer or a sharder of g cannot be made.
func checkGroup(g *comm.Group, op string) error {
	if g == nil {
		return fmt.Errorf("ddp: %s: no group given", op)
	}
	if err := route.GroupOf(g).Check(op); err != nil {
		return fmt.Errorf("ddp: %w", err)
	}
	return nil
}

// arguments describe the arguments of a call that must be the same on all ranks.
type arguments struct {
	Given   string
	What    string // the things that have Lengths, such as "gradient"
	Lengths []int
	Types   []memory.DType
	Shapes  [][]int  // or none
	Groups  []string // the identities of Autotune.Groups
}

// agree compares the arguments of all ranks. It returns an error on all ranks
// if the arguments differ or if one rank has a mistake, and that rank gets its
// own error. If all ranks are local, agree only returns mistake. Collective.
func agree(ctx context.Context, g *comm.Group, op string, mine arguments, mistake error) error {
	if g.Locals() == g.Size() {
		return mistake
	}
	err := route.Agree(ctx, g, "ddp: "+op, slices.Repeat([]arguments{mine}, g.Locals()), slices.Repeat([]error{mistake}, g.Locals()),
		func(all []collective.Said[arguments]) error { return compare(op, all) })
	return cmp.Or(mistake, err)
}

// compare returns an error if a rank has a mistake, or if the arguments differ.
func compare(op string, all []collective.Said[arguments]) error {
	for i, x := range all {
		if x.Failed != "" {
			return refuse(op, "rank %d has given something wrong: %s", i, x.Failed)
		}
	}
	for i := range all {
		if why := all[0].Value.differ(&all[i].Value, i); why != "" {
			return refuse(op, "%s: give the same on all ranks", safe.Text(why))
		}
	}
	return nil
}

// differ names the first difference between rank 0 and another rank, or returns "".
func (x *arguments) differ(other *arguments, rank int) string {
	if len(x.Lengths) == len(other.Lengths) {
		for i, n := range x.Lengths {
			if i >= len(x.Types) || i >= len(other.Types) {
				return fmt.Sprintf("rank 0 has %d types of %d %ss and rank %d has %d", len(x.Types), len(x.Lengths), x.What, rank, len(other.Types))
			}
			if m := other.Lengths[i]; m != n {
				return fmt.Sprintf("%s %d has %d elements on rank 0 and %d on rank %d", x.What, i, n, m, rank)
			}
			if t, u := x.Types[i], other.Types[i]; t != u {
				return fmt.Sprintf("%s %d is %s on rank 0 and %s on rank %d", x.What, i, t, u, rank)
			}
			if len(x.Shapes) > i && len(other.Shapes) > i && !slices.Equal(x.Shapes[i], other.Shapes[i]) {
				return fmt.Sprintf("%s %d has shape %v on rank 0 and %v on rank %d", x.What, i, x.Shapes[i], other.Shapes[i], rank)
			}
		}
	}
	if len(x.Groups) == len(other.Groups) {
		for k, g := range x.Groups {
			if g != other.Groups[k] {
				return fmt.Sprintf("Autotune.Groups[%d] is one group on rank 0 and another one on rank %d", k, rank)
			}
		}
	}
	if x.Given != other.Given {
		return fmt.Sprintf("rank 0 has given %s and rank %d %s", x.Given, rank, other.Given)
	}
	return ""
}

// describe describes gradients or parameters and their buckets, for agree.
func describe(what string, lens []int, types []memory.DType, first, bytes int, op comm.Op) arguments {
	sum := 0
	for _, n := range lens {
		sum += n
	}
	by := op.String()
	if op > comm.Avg { // each communicator numbers its own
		by = "a factor"
	}
	given := fmt.Sprintf("%d %ss of %v, %d elements in all, in buckets of %d and %d bytes by %s",
		len(lens), what, slices.Compact(slices.Clone(types)), sum, first, bytes, by)
	return arguments{Given: given, What: what, Lengths: lens, Types: types}
}
