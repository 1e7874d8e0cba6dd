package differ

import (
	"context"
	"fmt"
	"time"

	"github.com/gochorus/chorus/stream"
)

var streamKinds = map[string]*kind{
	"stream new": {
		weight: 6,
		draw: func(g *generator, op *Op) bool {
			op.R, op.A = g.number(), -int64(g.rnd.IntN(3))
			return g.count(isStream) < 5
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := r.b.newStream(int(op.A))
			return r.put(op, s, err)
		},
		model: func(m *model, op *Op) want {
			s := m.newStream(op.R)
			m.objs[op.R], s.priority = s, op.A
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("s%d, err = stream.New(dev, &stream.Config{Priority: %d})\nreturn err", op.R, op.A)
		},
	},
	"stream default": {
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			op.R = g.number()
			return g.m.legacy == nil && g.chance(50)
		},
		run: func(r *runner, op *Op, _ *result) error { return r.put(op, stream.Default(r.b.dev), nil) },
		model: func(m *model, op *Op) want {
			if m.legacy == nil {
				m.legacy = m.newStream(op.R)
			}
			m.objs[op.R] = m.legacy
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("s%d = stream.Default(dev)\nreturn nil", op.R) },
	},
	"stream close": {
		weight: 2,
		draw:   drawStream,
		run:    onStream(func(r *runner, s *stream.Stream, _ *result) error { r.b.closed++; return s.Close() }),
		model: ofStream(func(m *model, s *mStream) want {
			switch {
			case s.closed:
				return fine
			case s == m.legacy:
				return errs(kArgument)
			case s.cap != nil:
				return errs(kCapture)
			}
			s.closed = true
			return fine
		}),
		code: func(op *Op) string { return fmt.Sprintf("return s%d.Close()", op.S) },
	},
	"stream sync": {
		weight: 6,
		draw:   drawStream,
		run:    onStream(func(r *runner, s *stream.Stream, _ *result) error { return s.Sync(context.Background()) }),
		model: ofStream(func(m *model, s *mStream) want {
			if w, ok := m.waitable(s); !ok {
				return w
			}
			if m.debug {
				return errs(kWaits)
			}
			return m.awaitAll(s)
		}),
		code: func(op *Op) string { return fmt.Sprintf("return s%d.Sync(context.Background())", op.S) },
	},
	"stream sync ctx": { // by queries
		weight: 2,
		draw:   drawStream,
		run:    onStream(func(r *runner, s *stream.Stream, _ *result) error { return s.Sync(r.ctx) }),
		model: ofStream(func(m *model, s *mStream) want {
			if w, ok := m.waitable(s); !ok {
				return w
			}
			if m.debug {
				return errs(kWaits)
			}
			return m.awaitAll(s)
		}),
		code: func(op *Op) string {
			return fmt.Sprintf("ctx, cancel := context.WithTimeout(context.Background(), time.Minute)\ndefer cancel()\nreturn s%d.Sync(ctx)", op.S)
		},
	},
	"stream query": { // until it says that everything is done
		weight: 3,
		draw:   drawStream,
		run: onStream(func(r *runner, s *stream.Stream, res *result) error {
			done, err := until(s.Query)
			res.Text = fmt.Sprint(done)
			return err
		}),
		model: ofStream(func(m *model, s *mStream) want {
			if w, ok := m.waitable(s); !ok {
				w.text = "false"
				return w
			}
			w := m.awaitAll(s)
			w.text = fmt.Sprint(len(w.kinds) == 0)
			return w
		}),
		code: func(op *Op) string {
			return fmt.Sprintf("for done := false; !done && err == nil; {\ndone, err = s%d.Query()\n}\nreturn err", op.S)
		},
	},
	"stream capturing": {
		weight: 2,
		draw:   drawStream,
		run: onStream(func(r *runner, s *stream.Stream, res *result) error {
			yes, err := s.Capturing()
			res.Text = fmt.Sprint(yes)
			return err
		}),
		model: ofStream(func(m *model, s *mStream) want {
			if s.closed {
				return want{kinds: []string{kClosed}, text: "false"}
			}
			return want{text: fmt.Sprint(s.cap != nil)}
		}),
		code: func(op *Op) string { return fmt.Sprintf("_, err = s%d.Capturing()\nreturn err", op.S) },
	},
	"stream wait stream": {
		weight: 10,
		draw: func(g *generator, op *Op) bool {
			return drawStream(g, op) && g.any(&op.O, isStream)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, o, err := two[*stream.Stream, *stream.Stream](r, op.S, op.O)
			if err != nil {
				return err
			}
			return s.WaitStream(o)
		},
		model: func(m *model, op *Op) want {
			s, o := m.stream(op.S), m.stream(op.O)
			switch {
			case s == nil || o == nil:
				return errs(kAbsent)
			case s.closed || o.closed:
				return errs(kClosed)
			case s == o:
				return fine
			case s == m.legacy && o.cap != nil: // it takes part in no capture
				return errs(kCapture)
			}
			e := &mEvent{}
			if w := m.mark(e, o); w.any || len(w.kinds) > 0 {
				return w
			}
			return m.waitFor(s, e)
		},
		code: func(op *Op) string { return fmt.Sprintf("return s%d.WaitStream(s%d)", op.S, op.O) },
	},
	"callback": {
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			op.N = g.rnd.IntN(maxCallbacks)
			return drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			return s.Callback(func() { r.calls[op.N].Add(1) })
		},
		model: func(m *model, op *Op) want {
			s := m.stream(op.S)
			if s == nil {
				return errs(kAbsent)
			}
			if s.closed {
				return errs(kClosed)
			}
			return m.submit(s, work{sig: "host", effect: func(*launch) { m.calls[op.N]++ }})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return s%d.Callback(func() { calls[%d].Add(1) })", op.S, op.N)
		},
	},
	"callback panics": { // the next wait for the stream says so
		weight: 1,
		draw:   drawStream,
		run: onStream(func(r *runner, s *stream.Stream, _ *result) error {
			return s.Callback(func() { panic("in a callback") })
		}),
		model: ofOpen(func(m *model, s *mStream) want {
			if s.cap != nil {
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
			return m.submit(s, work{effect: func(*launch) { s.panicked = true }})
		}),
		code: func(op *Op) string {
			return fmt.Sprintf("return s%d.Callback(func() { panic(\"in a callback\") })", op.S)
		},
	},
	"device sync": {
		weight: 2,
		draw:   func(g *generator, op *Op) bool { return len(g.m.open) == 0 || g.chance(10) },
		run:    func(r *runner, op *Op, _ *result) error { return r.b.dev.Sync(context.Background()) },
		model: func(m *model, op *Op) want {
			if len(m.open) > 0 {
				return errs(kCapture) // cuCtxSynchronize concerns all streams of the device
			}
			for _, s := range m.slots[1:] {
				m.await(s)
			}
			return fine
		},
		code: func(op *Op) string { return "return dev.Sync(context.Background())" },
	},
}

const anyText = "*" // every text is right

// awaitAll blocks the host until a stream is idle and its callbacks have returned.
func (m *model) awaitAll(s *mStream) want {
	m.await(s)
	if s.panicked {
		s.panicked = false
		return errs(kCallback)
	}
	return fine
}

// until queries until the answer is yes.
func until(query func() (bool, error)) (done bool, err error) {
	for start := time.Now(); err == nil && !done && time.Since(start) < 10*time.Second; {
		done, err = query()
	}
	return done, err
}

// waitable predicts the error of a wait of the host for the stream, and reports whether
// it is nil.
func (m *model) waitable(s *mStream) (want, bool) {
	switch {
	case s.closed:
		return errs(kClosed), false
	case s.cap != nil:
		return errs(kCapture), false
	case m.forbidden():
		return errs(kCapture), false
	}
	return fine, true
}

func drawStream(g *generator, op *Op) bool { return g.any(&op.S, isStream) }

func onStream(fn func(*runner, *stream.Stream, *result) error) func(*runner, *Op, *result) error {
	return func(r *runner, op *Op, res *result) error {
		s, err := get[*stream.Stream](r, op.S)
		if err != nil {
			return err
		}
		return fn(r, s, res)
	}
}

func ofStream(fn func(*model, *mStream) want) func(*model, *Op) want {
	return func(m *model, op *Op) want {
		s := m.stream(op.S)
		if s == nil {
			return errs(kAbsent)
		}
		return fn(m, s)
	}
}

// two returns two objects.
func two[A, B any](r *runner, i, j int) (a A, b B, err error) {
	if a, err = get[A](r, i); err == nil {
		b, err = get[B](r, j)
	}
	return a, b, err
}
