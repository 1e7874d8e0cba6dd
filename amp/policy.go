package amp

import (
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A Class says how torch.autocast chooses the type of an operation.
type Class uint8

// The classes.
const (
	Unlisted Class = iota // in the types of its inputs
	Lower                 // in float16 or bfloat16
	Single                // in float32
	Widest                // in the widest type of its inputs
	Refused               // not at all: its result would overflow
)

// operations are torch's lists, by torch's names.
var operations = map[Class][]string{
	Lower: {
		"__matmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
		"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "GRUCell", "linear", "LSTMCell", "matmul", "mm", "multi_dot",
		"mv", "prelu", "RNNCell", "scaled_dot_product_attention",
	},
	Single: {
		"__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
		"cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
		"group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
		"margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist",
		"poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
		"softmin", "softplus", "sum", "tan", "triplet_margin_loss",
	},
	Widest: {
		"addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sample", "index_put", "scatter_add", "stack", "tensordot",
	},
	Refused: {"binary_cross_entropy"},
}

// ClassOf returns the class of the operation with the given name in torch.
func ClassOf(operation string) Class {
	for class, names := range operations {
		if slices.Contains(names, operation) {
			return class
		}
	}
	return Unlisted
}

// Operations returns the names of a class, sorted.
func Operations(c Class) []string {
	return slices.Sorted(slices.Values(operations[c]))
}

// Autocast chooses the types of operations as torch.autocast does. The zero Autocast has
// float16.
type Autocast struct {
	Lower memory.DType // Float16 or BFloat16; Invalid means Float16
}

// Type returns the type for an operation on inputs of the given types. It returns Invalid if
// the operation uses the types of its inputs: Unlisted operations, and all operations with an
// input of float64 or of an integer type.
func (a Autocast) Type(operation string, inputs ...memory.DType) (memory.DType, error) {
	lower := a.Lower
	switch lower {
	case memory.Invalid:
		lower = memory.Float16
	case memory.Float16, memory.BFloat16:
	default:
		return memory.Invalid, refuse("autocast", "%s: want float16 or bfloat16", lower)
	}
	for _, t := range inputs {
		if t != memory.Float16 && t != memory.BFloat16 && t != memory.Float32 {
			return memory.Invalid, nil
		}
	}
	switch ClassOf(operation) {
	case Lower:
		return lower, nil
	case Single:
		return memory.Float32, nil
	case Refused:
		return memory.Invalid, refuse("autocast", "%s overflows in half precision: use binary_cross_entropy_with_logits", operation)
	case Widest:
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
