package gemm

import (
	"errors"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
)

// A choice is the algorithm for a Problem on a device.
type choice struct {
	algo  cublasltapi.Algo
	need  uintptr
	tuned *Result // nil if it is the heuristic's first suggestion
}

// maxChoices is the number of choices that a device keeps. When there are more, those that
// were not tuned are dropped.
const maxChoices = 16384

// suggestions is the number of algorithms that cuBLASLt is asked for.
const suggestions = 8

func (c *choices) find(p *Problem) (choice, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	x, ok := c.list[*p]
	return x, ok
}

func (c *choices) add(p *Problem, x choice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.list) >= maxChoices {
		for k, old := range c.list {
			if old.tuned == nil {
				delete(c.list, k)
			}
		}
	}
	c.list[*p] = x
}

// choose sets the plan's algorithm: the device's choice, the result of a file, or the first of
// the heuristic's that can run.
func (q *queue) choose(p *plan) error {
	x, ok := q.site.choices.find(&p.Problem)
	if !ok {
		x, ok = q.restore(p)
	}
	if !ok {
		list, err := q.suggest(p, suggestions)
		if err != nil {
			return err
		}
		x = choice{algo: list[0].Algo, need: list[0].WorkspaceSize}
		q.site.choices.add(&p.Problem, x)
	}
	if x.tuned == nil {
		q.site.choices.record(&p.Problem)
	}
	p.algo, p.need, p.tuned = x.algo, x.need, x.tuned != nil
	return nil
}

// suggest returns up to n algorithms that can run, the fastest first by cuBLASLt's estimate.
// There is at least one, or an error.
func (q *queue) suggest(p *plan, n int) ([]cublasltapi.HeuristicResult, error) {
	lt := q.site.lt
	pref, r := lt.MatmulPreferenceCreate()
	if r != cublasapi.Success {
		return nil, failed("cublasLtMatmulPreferenceCreate", r)
	}
	err := prefer(lt, pref, &p.Problem)
	results, found := make([]cublasltapi.HeuristicResult, n), int32(0)
	if err == nil {
		o := &cublasltapi.Operation{Desc: p.desc, A: p.layouts[0], B: p.layouts[1], C: p.layouts[2], D: p.layouts[3]}
		err = q.bound(func() error {
			found, r = lt.MatmulAlgoGetHeuristic(q.site.handle, o, pref, results)
			return failed(heuristicCall, r)
		})
	}
	if err := errors.Join(err, failed("cublasLtMatmulPreferenceDestroy", lt.MatmulPreferenceDestroy(pref))); err != nil {
		return nil, err
	}
	usable := results[:0]
	for _, x := range results[:found] {
		if x.State == cublasapi.Success && int64(x.WorkspaceSize) <= p.workspace {
			usable = append(usable, x)
		}
	}
	if len(usable) == 0 {
		return nil, failed(heuristicCall, cublasapi.NotSupported)
	}
	return usable, nil
}

// prefer sets the limits for the choice.
func prefer(lt cublasltapi.API, pref cublasltapi.Preference, p *Problem) error {
	workspace, mask := uint64(p.workspace), p.Schemes
	r := lt.MatmulPreferenceSetAttribute(pref, cublasltapi.PreferenceMaxWorkspaceBytes, unsafe.Pointer(&workspace), unsafe.Sizeof(workspace))
	if r == cublasapi.Success && mask != cublasltapi.ReductionMask {
		r = lt.MatmulPreferenceSetAttribute(pref, cublasltapi.PreferenceReductionSchemeMask, unsafe.Pointer(&mask), unsafe.Sizeof(mask))
	}
	for i, log := range p.align {
		if r != cublasapi.Success {
			break
		}
		bytes := uint32(1) << log
		r = lt.MatmulPreferenceSetAttribute(pref, cublasltapi.PreferenceMinAlignmentABytes+cublasltapi.PreferenceAttribute(i), unsafe.Pointer(&bytes), unsafe.Sizeof(bytes))
	}
	return failed("cublasLtMatmulPreferenceSetAttribute", r)
}
