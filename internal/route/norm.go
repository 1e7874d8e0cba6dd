package route

import "github.com/gochorus/chorus/internal/fabric"

// EnqueueNorms is Enqueue for a batch with one all-reduce of each local rank, whose operand is
// the input of the rank's norm. If the Chorus kernels support it, one kernel on each rank
// executes both, and fused is true. Otherwise the batch is executed without the norms. All ranks
// have the same result.
func (b *Batch) EnqueueNorms(norms []fabric.Norm) (fused bool, err error) {
	b.norms = norms
	fused = len(b.routers) > 0
	for i, r := range b.routers {
		fused = fused && r.fuses(&norms[i])
	}
	defer func() { b.norms = nil }()
	if !fused {
		b.norms = nil
		return false, b.Enqueue()
	}
	for i, r := range b.routers {
		if err := r.kernels.LoadNorm(norms[i].DType); err != nil {
			b.Reset()
			return false, err
		}
	}
	return true, b.Enqueue()
}

// fuses reports whether a Chorus kernel executes an all-reduce with its norm, the same on all
// ranks. It selects the algorithm. In a group whose reductions are deterministic the answer is no:
// a fused kernel rounds once, and larger operations, which it does not support, round twice.
func (k *Router) fuses(x *fabric.Norm) bool {
	switch k.rule.Load().strategy {
	case OneShot:
		x.Algorithm = fabric.OneShot
	case TwoShotPackets:
		x.Algorithm = fabric.TwoShotPackets
	case OwnKernels, TwoShot, TwoShotLines, Tuned:
	default:
		return false
	}
	return k.kernels != nil && k.ordered == nil && k.kernels.TakesNorm(x)
}

// fuse lets a Chorus kernel execute a step together with its norm, if EnqueueNorms has decided so.
func (b *Batch) fuse(s *step) {
	if b.norms != nil {
		s.strategy, s.norm = OwnKernels, &b.norms[s.router.local]
	}
}
