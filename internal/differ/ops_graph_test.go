package differ

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var modes = []graph.Mode{graph.ThreadLocal, graph.Global, graph.Relaxed}

var modeNames = []string{"graph.ThreadLocal", "graph.Global", "graph.Relaxed"}

var graphKinds = map[string]*kind{
	"capture": {
		weight: 8,
		draw: func(g *generator, op *Op) bool {
			if !drawStream(g, op) || g.depth > 1 {
				return false
			}
			op.R, op.V, op.Fail = g.number(), []int{op.S}, g.chance(8)
			for range g.rnd.IntN(4) {
				var s int
				if g.any(&s, isStream) && (!slices.Contains(op.V, s) || g.chance(5)) {
					op.V = append(op.V, s)
				}
			}
			op.A = g.mode()
			g.freshPool(&op.O)
			return true
		},
		run: func(r *runner, op *Op, res *result) error {
			var list []*stream.Stream
			for _, n := range op.V {
				s, err := get[*stream.Stream](r, n)
				if err != nil {
					return err
				}
				list = append(list, s)
			}
			cfg := &graph.Config{Mode: modes[op.A]}
			if op.O > 0 {
				p, err := get[*memory.Pool](r, op.O)
				if err != nil {
					return err
				}
				cfg.Pool = p
			}
			x, err := graph.Capture(list, r.body(op), cfg)
			if err == nil {
				res.Text = fmt.Sprint(x.Nodes())
			}
			return r.put(op, x, err)
		},
		enter: enterCapture,
		leave: leaveCapture,
		code: func(op *Op) string {
			names := make([]string, len(op.V))
			for i, s := range op.V {
				names[i] = fmt.Sprintf("s%d", s)
			}
			return fmt.Sprintf("x%d, err = graph.Capture([]*stream.Stream{%s}, BODY, &graph.Config{%s})\nreturn err", op.R, strings.Join(names, ", "), configCode(op))
		},
	},
	"begin": {
		weight: 2,
		draw: func(g *generator, op *Op) bool {
			op.R, op.A = g.number(), g.mode()
			g.freshPool(&op.O)
			return drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			cfg := &graph.Config{Mode: modes[op.A]}
			if op.O > 0 {
				p, err := get[*memory.Pool](r, op.O)
				if err != nil {
					return err
				}
				cfg.Pool = p
			}
			rec, err := graph.Begin(s, cfg)
			return r.put(op, rec, err)
		},
		model: func(m *model, op *Op) want {
			s := m.stream(op.S)
			pool, w, ok := m.capturePool(op)
			switch {
			case s == nil:
				return errs(kAbsent)
			case !ok:
				return w
			}
			if w, ok := m.mayBegin(s, int(op.A)); !ok {
				return w
			}
			m.objs[op.R] = m.begin(s, int(op.A), m.thread, pool)
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("r%d, err = graph.Begin(s%d, &graph.Config{%s})\nreturn err", op.R, op.S, configCode(op))
		},
	},
	"end": {
		weight: 4,
		draw: func(g *generator, op *Op) bool {
			op.R = g.number()
			return g.any(&op.O, isRecording)
		},
		run: func(r *runner, op *Op, res *result) error {
			rec, err := get[*graph.Recording](r, op.O)
			if err != nil {
				return err
			}
			x, err := rec.End()
			if err == nil {
				res.Text = fmt.Sprint(x.Nodes())
			}
			return r.put(op, x, err)
		},
		model: func(m *model, op *Op) want {
			c := object[mCapture](m, op.O)
			switch {
			case c == nil:
				return errs(kAbsent)
			case c.ended:
				return errs(kClosed)
			case c.mode != 2 && c.thread != m.thread:
				return errs(cuWrongThread)
			}
			return m.instantiate(c, op.R)
		},
		code: func(op *Op) string { return fmt.Sprintf("x%d, err = r%d.End()\nreturn err", op.R, op.O) },
	},
	"abort": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isRecording) },
		run: func(r *runner, op *Op, _ *result) error {
			rec, err := get[*graph.Recording](r, op.O)
			if err != nil {
				return err
			}
			return rec.Abort()
		},
		model: func(m *model, op *Op) want {
			c := object[mCapture](m, op.O)
			switch {
			case c == nil:
				return errs(kAbsent)
			case c.ended:
				return fine
			case c.mode != 2 && c.thread != m.thread:
				return errs(cuWrongThread)
			}
			w := m.finish(c)
			m.drop(c)
			if w.any {
				return w
			}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return r%d.Abort()", op.O) },
	},
	"launch": {
		weight: 12,
		draw: func(g *generator, op *Op) bool {
			return g.any(&op.O, isExec) && drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			x, s, err := two[*graph.Exec, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return x.Launch(s)
		},
		model: func(m *model, op *Op) want {
			x, s, w := m.mayLaunch(op)
			if x == nil {
				return w
			}
			return m.launch(x, s)
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.Launch(s%d)", op.O, op.S) },
	},
	"upload": {
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			return g.any(&op.O, isExec) && drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			x, s, err := two[*graph.Exec, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return x.Upload(s)
		},
		model: func(m *model, op *Op) want {
			_, _, w := m.mayLaunch(op)
			return w
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.Upload(s%d)", op.O, op.S) },
	},
	"update": {
		weight: 2,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isExec) && g.any(&op.N, isExec) },
		run: func(r *runner, op *Op, _ *result) error {
			x, o, err := two[*graph.Exec, *graph.Exec](r, op.O, op.N)
			if err != nil {
				return err
			}
			return x.Update(o)
		},
		model: modelUpdate,
		code:  func(op *Op) string { return fmt.Sprintf("return x%d.Update(x%d)", op.O, op.N) },
	},
	"exec close": {
		weight: 2,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isExec) },
		run: func(r *runner, op *Op, _ *result) error {
			x, err := get[*graph.Exec](r, op.O)
			if err != nil {
				return err
			}
			return x.Close()
		},
		model: func(m *model, op *Op) want {
			x := object[mExec](m, op.O)
			switch {
			case x == nil:
				return errs(kAbsent)
			case x.doubt:
				m.conflict = &conflict{s: nil, slot: -1}
				return fine
			case !x.closed:
				x.closed = true
				x.release(m)
			}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.Close()", op.O) },
	},
}

func configCode(op *Op) string {
	text := "Mode: " + modeNames[op.A]
	if op.O > 0 {
		text += fmt.Sprintf(", Pool: p%d", op.O)
	}
	return text
}

// capturePool returns the pool of a capture, or the error of the capture.
func (m *model) capturePool(op *Op) (*mPool, want, bool) {
	if op.O == 0 {
		return nil, fine, true
	}
	p := object[mPool](m, op.O)
	switch {
	case p == nil:
		return nil, errs(kAbsent), false
	case p.closed:
		return nil, errs(kClosed), false
	case slices.ContainsFunc(m.open, func(c *mCapture) bool { return c.pool == p }):
		return nil, errs(kArgument), false
	}
	return p, fine, true
}

// mayBegin predicts the error of beginning a capture, and reports whether it is nil.
func (m *model) mayBegin(s *mStream, mode int) (want, bool) {
	if m.group != nil { // it comes before the group, or the group is refused
		m.conflict = &conflict{s: s, slot: -1}
		return fine, false
	}
	switch {
	case s.closed:
		return errs(kClosed), false
	case s == m.legacy:
		return errs(cuUnsupported, kCapture), false
	case s.cap != nil, mode != 2 && m.threads[m.thread] != nil:
		return errs(kCapture), false
	}
	return fine, true
}

func enterCapture(m *model, op *Op) (want, bool) {
	var list []*mStream
	for _, n := range op.V {
		s := m.stream(n)
		if s == nil {
			return errs(kAbsent), false
		}
		list = append(list, s)
	}
	pool, w, ok := m.capturePool(op)
	if !ok && w.kinds[0] == kAbsent {
		return w, false
	}
	for i, s := range list {
		switch {
		case s.closed:
			return errs(kClosed), false
		case slices.Contains(list[:i], s):
			return errs(kArgument), false
		case s.cap != nil:
			return errs(kCapture), false
		}
	}
	if v, ok := m.mayBegin(list[0], int(op.A)); !ok {
		return errs(append(v.kinds, w.kinds...)...), false
	}
	if !ok {
		return w, false
	}
	c := m.begin(list[0], int(op.A), m.thread, pool)
	for _, s := range list[1:] {
		if s == m.legacy { // it takes part in no capture
			m.finish(c)
			m.drop(c)
			return errs(kCapture), false
		}
		c.join(s, 0, 0)
	}
	m.bodies = append(m.bodies, c)
	return fine, true
}

func leaveCapture(m *model, op *Op) want {
	c := m.bodies[len(m.bodies)-1]
	m.bodies = m.bodies[:len(m.bodies)-1]
	if op.Fail {
		m.finish(c)
		m.drop(c)
		return errs(kBody)
	}
	for _, n := range op.V[1:] {
		s := m.stream(n)
		var w want
		if s.closed {
			w = errs(kClosed)
		} else {
			e := &mEvent{}
			if w = m.mark(e, s); len(w.kinds) == 0 && !w.any {
				w = m.waitFor(c.origin, e)
			}
		}
		if len(w.kinds) > 0 && !w.any {
			m.finish(c)
			m.drop(c)
			return w
		}
	}
	return m.instantiate(c, op.R)
}

// instantiate ends a capture and makes its graph.
func (m *model) instantiate(c *mCapture, obj int) want {
	w := m.finish(c)
	x := c.exec
	x.nodes, x.draws = c.nodes, c.draws
	switch {
	case w.any:
		m.vague, x.doubt = true, true
		m.objs[obj] = x
		return want{any: true, text: anyText}
	case len(c.nodes) == 0 && len(w.kinds) == 0: // it may be an error
		x.doubt = true
		m.objs[obj] = x
		return want{kinds: []string{"", kArgument}, text: anyText}
	case len(w.kinds) > 0:
		m.drop(c)
		return w
	}
	m.objs[obj] = x
	w.text = fmt.Sprint(len(c.nodes))
	return w
}

// mayLaunch returns the graph and the stream of a launch, or the error of the launch.
func (m *model) mayLaunch(op *Op) (*mExec, *mStream, want) {
	x, s := object[mExec](m, op.O), m.stream(op.S)
	switch {
	case x == nil || s == nil:
		return nil, nil, errs(kAbsent)
	case x.doubt:
		m.conflict = &conflict{s: s, slot: -1}
		return nil, nil, fine
	case s.closed:
		return nil, nil, errs(kClosed)
	case s.cap != nil:
		return nil, nil, errs(kCapture)
	case x.closed:
		return nil, nil, errs(kClosed)
	}
	return x, s, fine
}

func (m *model) launch(x *mExec, s *mStream) want {
	for _, d := range x.draws {
		if d.last != nil && d.last != s && d.last.cap != nil {
			return errs(kCapture) // the launch has to wait for that stream
		}
	}
	var all []access
	for _, n := range x.nodes {
		for _, a := range n.accesses {
			a.kept = a.m.born != nil && a.m.born.exec.keeps(x)
			all = append(all, a)
		}
	}
	effect := func(*launch) {
		for _, a := range all { // what an earlier launch left there may be overwritten by that of other memory
			if a.m.born != nil && a.m.born.freed && (a.m.reused || a.m.closed) {
				clear(a.m.mask)
			}
		}
		l := &launch{base: map[*mDraw]place{}}
		for _, d := range x.draws {
			l.base[d] = place{d.gen.seed, d.gen.offset}
			d.gen.offset += d.total
		}
		for _, n := range x.nodes {
			if n.effect != nil {
				n.effect(l)
			}
		}
	}
	seen := s.seen.clone()
	s.seen.join(x.ends)
	w := m.submit(s, work{sig: "graph", accesses: all, effect: effect})
	if m.conflict != nil {
		s.seen = seen
		return w
	}
	x.ends = s.now()
	for _, d := range x.draws {
		d.last = s
	}
	return w
}

// keeps reports whether memory that was born in the capture of x is kept by o too.
func (x *mExec) keeps(o *mExec) bool { return x == o || slices.Contains(o.others, x) }

func modelUpdate(m *model, op *Op) want {
	x, o := object[mExec](m, op.O), object[mExec](m, op.N)
	switch {
	case x == nil || o == nil:
		return errs(kAbsent)
	case x.doubt || o.doubt:
		m.conflict = &conflict{s: nil, slot: -1}
		return fine
	case x.closed || o.closed:
		return errs(kClosed)
	case x == o:
		return fine
	}
	nodes := o.owner.nodes // as they were captured, whatever o was updated to
	if len(x.nodes) != len(nodes) {
		return errs(kUpdate)
	}
	for i := range x.nodes {
		if a, b := x.nodes[i], nodes[i]; a.sig != b.sig || a.direct != b.direct || a.sig == "tensor" || b.perhapsUnmapped() {
			m.vague, m.fuzzy, x.doubt = true, true, true // x keeps what o has, or not
			return want{any: true}
		}
		if a, b := x.nodes[i], nodes[i]; strings.HasPrefix(a.sig, "kernel") && a.s.priority != b.s.priority {
			return errs(kUpdate)
		}
	}
	x.nodes, x.draws = nodes, o.owner.draws
	if !slices.Contains(x.others, o) {
		x.others = append(x.others, o)
		o.owner.refs++
	}
	return fine
}

// perhapsUnmapped reports whether the node uses memory that was closed: the allocator may have
// kept it, or not.
func (n *mNode) perhapsUnmapped() bool {
	return slices.ContainsFunc(n.accesses, func(a access) bool { return a.m.born == nil && a.gone() })
}

// release frees the memory that a graph has kept.
func (x *mExec) release(m *model) {
	for _, c := range append([]*mExec{x}, x.others...) {
		if c.owner.refs--; c.owner.refs < 0 {
			m.drop(c.owner)
		}
	}
}
