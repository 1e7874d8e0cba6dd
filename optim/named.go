package optim

import (
	"iter"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// All returns the tensors that the state has with torch's names: step (a tensor without
// dimensions), exp_avg, exp_avg_sq, max_exp_avg_sq and momentum_buffer. A checkpoint that
// restores all of them, and the parameters, restores the optimiser; see
// [Optimizer.RefreshCopies]. The order is the same on all ranks.
func (x State) All() iter.Seq2[string, tensor.Tensor] {
	return func(yield func(string, tensor.Tensor) bool) {
		if x.Step.Len() == 1 {
			if step, err := tensor.Of(x.Step); err == nil && !yield("step", step) {
				return
			}
		}
		for _, t := range [...]struct {
			name string
			of   tensor.Tensor
		}{
			{"exp_avg", x.ExpAvg}, {"exp_avg_sq", x.ExpAvgSq}, {"max_exp_avg_sq", x.MaxExpAvgSq}, {"momentum_buffer", x.MomentumBuffer},
		} {
			if t.of.DType() != memory.Invalid && !yield(t.name, t.of) {
				return
			}
		}
	}
}
