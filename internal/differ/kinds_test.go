package differ

import (
	"maps"
	"slices"
)

// A kind is one operation of the public API: how it is drawn, predicted and executed,
// and the Go statement that does the same.
type kind struct {
	weight int
	// draw fills in an operation, and reports false if it has no object to work on.
	draw func(g *generator, op *Op) bool
	run  func(r *runner, op *Op, res *result) error
	// model predicts the result of the operation, and changes the model. If it sets
	// conflict, it changes nothing else.
	model func(m *model, op *Op) want
	// code returns the body of a Go function that returns an error.
	code func(op *Op) string
	// enter is model for a kind with a body: it reports whether the body is called.
	// leave predicts the result after the body.
	enter func(m *model, op *Op) (want, bool)
	leave func(m *model, op *Op) want
}

var kinds = map[string]*kind{}

// names has the kinds in a fixed order.
var names []string

func init() {
	for _, list := range []map[string]*kind{streamKinds, eventKinds, memoryKinds, pinnedKinds, poolKinds, kernelKinds, rngKinds, graphKinds, ncclKinds, tensorKinds, limitKinds} {
		maps.Copy(kinds, list)
	}
	names = slices.Sorted(maps.Keys(kinds))
}

// step executes an operation in the model, its body included.
func (m *model) step(op *Op, wants []want) want {
	if m.lost { // the backends are compared with each other alone
		wants[op.at] = want{any: true, text: anyText}
		each(op.Do, func(o *Op) { wants[o.at] = want{any: true, text: anyText} })
		return wants[op.at]
	}
	k := kinds[op.K]
	before := m.thread
	m.thread = max(m.thread, op.T)
	defer func() { m.thread = before }()
	var w want
	if k.enter == nil {
		w = k.model(m, op)
	} else {
		var enter bool
		if w, enter = k.enter(m, op); enter {
			for i := range op.Do {
				m.step(&op.Do[i], wants)
			}
			w = k.leave(m, op)
		} else {
			each(op.Do, func(o *Op) { wants[o.at] = errs(kSkipped) })
		}
	}
	wants[op.at] = w
	return w
}

// predict returns the result of each operation of a program. It reports false if the
// program has a race.
func predict(p *Program) (*model, []want, bool) {
	wants := make([]want, p.number())
	m := newModel()
	for i := range p.Ops {
		m.step(&p.Ops[i], wants)
	}
	return m, wants, m.conflict == nil
}
