package amp

import (
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The classes of operations.
const (
	lower   = "lower"   // in float16 or bfloat16
	single  = "float32" // in float32
	widened = "widest"  // in the widest type of its inputs
	refused = "refused" // not at all: its result would overflow
)

// operations are torch's lists, by torch's names.
var operations = map[string][]string{
	lower: {
		"__matmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
		"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "GRUCell", "linear", "LSTMCell", "matmul", "mm", "multi_dot",
		"mv", "prelu", "RNNCell", "scaled_dot_product_attention",
	},
	single: {
		"__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
		"cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
		"group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
		"margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist",
		"poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
		"softmin", "softplus", "sum", "tan", "triplet_margin_loss",
	},
	widened: {
		"addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sample", "index_put", "scatter_add", "stack", "tensordot",
	},
	refused: {"binary_cross_entropy"},
}

// ClassOf returns how torch.autocast chooses the type of an operation, by its name in
// torch:
//   - "lower": float16 or bfloat16
//   - "float32"
//   - "widest": the widest type of its inputs
//   - "refused": none, because its result would overflow
//   - "": the types of its inputs
func ClassOf(operation string) string {
	for class, names := range operations {
		if slices.Contains(names, operation) {
			return class
		}
	}
	return ""
}

// Operations returns the names of the operations for which ClassOf returns class, sorted.
// The class "" has no list.
func Operations(class string) []string {
	return slices.Sorted(slices.Values(operations[class]))
}

// Autocast chooses the types of operations as torch.autocast does. The zero Autocast has
// float16.
type Autocast struct {
	Lower memory.DType // Float16 or BFloat16; Invalid means Float16
}

// Type returns the type for an operation on inputs of the given types. It returns Invalid if
// the operation uses the types of its inputs: operations without a class, and all operations with an
// input of float64 or of an integer type.
func (a Autocast) Type(operation string, inputs ...memory.DType) (memory.DType, error) {
	half := a.Lower
	switch half {
	case memory.Invalid:
		half = memory.Float16
	case memory.Float16, memory.BFloat16:
	default:
		return memory.Invalid, refuse("autocast", "%s: want float16 or bfloat16", half)
	}
	for _, t := range inputs {
		if t != memory.Float16 && t != memory.BFloat16 && t != memory.Float32 {
			return memory.Invalid, nil
		}
	}
	switch ClassOf(operation) {
	case lower:
		return half, nil
	case single:
		return memory.Float32, nil
	case refused:
		return memory.Invalid, refuse("autocast", "%s overflows in half precision: use binary_cross_entropy_with_logits", operation)
	case widened:
		return widest(inputs), nil
	}
	return memory.Invalid, nil
}

// widest returns the type that holds all of the types.
func widest(ts []memory.DType) memory.DType {
	wide := memory.Invalid
	for _, t := range ts {
		if wide == memory.Invalid || wide == t {
			wide = t
		} else {
			wide = memory.Float32
		}
	}
	return wide
}

// Cast returns the inputs of an operation in the type of Type. It enqueues copies on s of the
// inputs that have another type; each result is the caller's to close.
func (a Autocast) Cast(s *stream.Stream, operation string, inputs ...tensor.Tensor) ([]tensor.Tensor, error) {
	types := make([]memory.DType, len(inputs))
	for i, x := range inputs {
		types[i] = x.DType()
	}
	to, err := a.Type(operation, types...)
	if err != nil {
		return nil, err
	}
	out := make([]tensor.Tensor, 0, len(inputs))
	for i, x := range inputs {
		if to == memory.Invalid || to == types[i] {
			out = append(out, x.Retain())
			continue
		}
		y, err := tensor.MakeLike(s, x, to)
		if err == nil {
			out = append(out, y)
			err = tensor.Copy(s, y, x)
		}
		if err != nil {
			for _, y := range out {
				_ = y.Close()
			}
			return nil, refuse("autocast", "input %d of %s: %w", i, operation, err)
		}
	}
	return out, nil
}

// Agree enqueues an all-reduce of the scalers' results of checks. If a scaler has found an
// infinity or NaN on one rank, the scalers of all ranks skip the step, and all keep the same
// scale. If ranks have different gradients, call Unscale or Check for each optimiser, then Agree,
// and then Step. Agree returns an error if no gradients were checked since the last Update. After
// Agree, Step refuses an optimiser that was not checked. scalers has
// one scaler for each local rank of the group, in order. On all ranks, they serve the same
// optimisers in the same order. The group's streams wait for the scalers' last operations, and
// the scalers' streams wait for the result. Collective.
//
// After an error, such as a closed scaler, the process has enqueued no all-reduce, and the other
// processes wait for it: close the group, so that they get an error.
func Agree(g *comm.Group, scalers ...*Scaler) error {
	const op = "agree"
	if g == nil || len(scalers) != g.Locals() {
		return refuse(op, "%d scalers: want one for each local rank of a group", len(scalers))
	}
	found, streams := make([]memory.Slice[float32], len(scalers)), make([]*stream.Stream, len(scalers))
	for i, sc := range scalers {
		if sc == nil {
			return refuse(op, "scaler %d is nil", i)
		}
		if _, err := sc.enter(op, sc.s); err != nil {
			return err
		}
		if !sc.cfg.Disabled && !sc.looked() {
			return refuse(op, "scaler %d has checked no gradients since the last Update: call Unscale or Check before", i)
		}
		found[i], streams[i] = sc.found, sc.s
	}
	err := g.Between(streams, func() error { return comm.AllReduce(g, comm.Max, found...) })
	if err == nil {
		for _, sc := range scalers {
			sc.agreed = true
		}
	}
	return err
}
