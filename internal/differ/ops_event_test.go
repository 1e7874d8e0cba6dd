package differ

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/stream"
)

var eventKinds = map[string]*kind{
	"event new": {
		weight: 4,
		draw: func(g *generator, op *Op) bool {
			op.R, op.N = g.number(), g.rnd.IntN(2)
			return g.count(isEvent) < 5
		},
		run: func(r *runner, op *Op, _ *result) error {
			e, err := stream.NewEvent(r.b.dev, &stream.EventConfig{Timing: op.N == 1})
			return r.put(op, e, err)
		},
		model: func(m *model, op *Op) want {
			m.objs[op.R] = &mEvent{timing: op.N == 1}
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("e%d, err = stream.NewEvent(dev, &stream.EventConfig{Timing: %t})\nreturn err", op.R, op.N == 1)
		},
	},
	"event close": {
		weight: 1,
		draw:   drawEvent,
		run:    onEvent(func(r *runner, e *stream.Event, _ *result) error { return e.Close() }),
		model:  ofEvent(func(m *model, e *mEvent) want { e.closed = true; return fine }),
		code:   func(op *Op) string { return fmt.Sprintf("return e%d.Close()", op.O) },
	},
	"event record": {
		weight: 8,
		draw:   func(g *generator, op *Op) bool { return drawEvent(g, op) && drawStream(g, op) },
		run: func(r *runner, op *Op, _ *result) error {
			e, s, err := two[*stream.Event, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return e.Record(s)
		},
		model: func(m *model, op *Op) want {
			e, s := m.event(op.O), m.stream(op.S)
			switch {
			case s == nil || e == nil:
				return errs(kAbsent)
			case e.closed || s.closed:
				return errs(kClosed)
			}
			return m.mark(e, s)
		},
		code: func(op *Op) string { return fmt.Sprintf("return e%d.Record(s%d)", op.O, op.S) },
	},
	"stream wait event": {
		weight: 9,
		draw:   func(g *generator, op *Op) bool { return drawEvent(g, op) && drawStream(g, op) },
		run: func(r *runner, op *Op, _ *result) error {
			e, s, err := two[*stream.Event, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return s.Wait(e)
		},
		model: func(m *model, op *Op) want {
			e, s := m.event(op.O), m.stream(op.S)
			switch {
			case s == nil || e == nil:
				return errs(kAbsent)
			case e.closed || s.closed:
				return errs(kClosed)
			case s == m.legacy && e.cap != nil:
				return errs(kCapture)
			}
			return m.waitFor(s, e)
		},
		code: func(op *Op) string { return fmt.Sprintf("return s%d.Wait(e%d)", op.S, op.O) },
	},
	"event sync": {
		weight: 4,
		draw:   drawEvent,
		run:    onEvent(func(r *runner, e *stream.Event, _ *result) error { return e.Sync(context.Background()) }),
		model: ofEvent(func(m *model, e *mEvent) want {
			w, ok := m.askable(e)
			if ok && e.recorded {
				m.host.join(e.at)
			}
			return w
		}),
		code: func(op *Op) string { return fmt.Sprintf("return e%d.Sync(context.Background())", op.O) },
	},
	"event query": { // until it says that the point has been passed
		weight: 3,
		draw:   drawEvent,
		run: onEvent(func(r *runner, e *stream.Event, res *result) error {
			done, err := until(e.Query)
			res.Text = fmt.Sprint(done)
			return err
		}),
		model: ofEvent(func(m *model, e *mEvent) want {
			w, ok := m.askable(e)
			w.text = fmt.Sprint(ok)
			if ok && e.recorded {
				m.host.join(e.at)
			}
			return w
		}),
		code: func(op *Op) string {
			return fmt.Sprintf("for done := false; !done && err == nil; {\ndone, err = e%d.Query()\n}\nreturn err", op.O)
		},
	},
	"event elapsed": {
		weight: 2,
		draw:   func(g *generator, op *Op) bool { return drawEvent(g, op) && g.any(&op.N, isEvent) },
		run: func(r *runner, op *Op, _ *result) error {
			e, start, err := two[*stream.Event, *stream.Event](r, op.O, op.N)
			if err != nil {
				return err
			}
			_, err = e.Elapsed(start)
			return err
		},
		model: func(m *model, op *Op) want {
			e, start := m.event(op.O), m.event(op.N)
			switch {
			case e == nil || start == nil:
				return errs(kAbsent)
			case e.closed || start.closed:
				return errs(kClosed, kCapture)
			case e.cap != nil || start.cap != nil || m.forbidden():
				return errs(kCapture)
			case !e.timing || !start.timing || !e.recorded || !start.recorded:
				return errs(cuHandle)
			}
			if !m.passed(e) || !m.passed(start) {
				return want{kinds: []string{"", "cuda:NOT_READY"}}
			}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("_, err = e%d.Elapsed(e%d)\nreturn err", op.O, op.N) },
	},
}

// askable predicts the error of a query or wait of the host for an event, and reports
// whether it is nil.
func (m *model) askable(e *mEvent) (want, bool) {
	switch {
	case e.closed:
		return errs(kClosed), false
	case e.cap != nil:
		return errs(kCapture), false
	case m.forbidden():
		return errs(kCapture), false
	}
	return fine, true
}

// passed reports whether the host knows that the marked point has been passed.
func (m *model) passed(e *mEvent) bool {
	for slot, at := range e.at {
		if e.recorded && slot != 0 && m.host[slot] < at {
			return false
		}
	}
	return true
}

func drawEvent(g *generator, op *Op) bool { return g.any(&op.O, isEvent) }

func onEvent(fn func(*runner, *stream.Event, *result) error) func(*runner, *Op, *result) error {
	return func(r *runner, op *Op, res *result) error {
		e, err := get[*stream.Event](r, op.O)
		if err != nil {
			return err
		}
		return fn(r, e, res)
	}
}

func ofEvent(fn func(*model, *mEvent) want) func(*model, *Op) want {
	return func(m *model, op *Op) want {
		e := m.event(op.O)
		if e == nil {
			return errs(kAbsent)
		}
		return fn(m, e)
	}
}
