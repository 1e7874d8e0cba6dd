package differ

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var poolKinds = map[string]*kind{
	"pool new": {
		weight: 2,
		draw: func(g *generator, op *Op) bool {
			op.R, op.N = g.number(), g.rnd.IntN(4)
			return g.count(isPool) < 2
		},
		run: func(r *runner, op *Op, _ *result) error {
			return r.put(op, memory.NewPool(&memory.PoolConfig{NoSplit: op.N == 1, UseOnOOM: op.N == 2}), nil)
		},
		model: func(m *model, op *Op) want {
			m.objs[op.R] = &mPool{whole: op.N == 1}
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("p%d = memory.NewPool(&memory.PoolConfig{NoSplit: %t, UseOnOOM: %t})\nreturn nil", op.R, op.N == 1, op.N == 2)
		},
	},
	"pool close": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isPool) },
		run: func(r *runner, op *Op, _ *result) error {
			p, err := get[*memory.Pool](r, op.O)
			if err != nil {
				return err
			}
			return p.Close()
		},
		model: func(m *model, op *Op) want {
			p := object[mPool](m, op.O)
			if p == nil {
				return errs(kAbsent)
			}
			p.closed = true
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return p%d.Close()", op.O) },
	},
	"pool allocated": {
		weight: 2,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isPool) },
		run: func(r *runner, op *Op, res *result) error {
			p, err := get[*memory.Pool](r, op.O)
			if err == nil {
				res.Text = fmt.Sprint(p.Allocated())
			}
			return err
		},
		model: func(m *model, op *Op) want {
			p := object[mPool](m, op.O)
			switch {
			case p == nil:
				return errs(kAbsent)
			case m.fuzzy:
				return want{text: anyText}
			}
			return want{text: fmt.Sprint(p.bytes)}
		},
		code: func(op *Op) string { return fmt.Sprintf("fmt.Println(p%d.Allocated())\nreturn nil", op.O) },
	},
	"pool use": {
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			op.Fail = g.chance(5)
			return g.depth < 2 && drawStream(g, op) && g.any(&op.O, isPool)
		},
		run: func(r *runner, op *Op, _ *result) error {
			p, s, err := two[*memory.Pool, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return p.Use(s, r.body(op))
		},
		enter: func(m *model, op *Op) (want, bool) {
			p, s := object[mPool](m, op.O), m.stream(op.S)
			switch {
			case p == nil || s == nil:
				return errs(kAbsent), false
			case s.closed || p.closed:
				return errs(kClosed), false
			}
			m.pools[op.S] = append(m.pools[op.S], p)
			return fine, true
		},
		leave: func(m *model, op *Op) want {
			m.pools[op.S] = m.pools[op.S][:len(m.pools[op.S])-1]
			return bodyWant(op)
		},
		code: func(op *Op) string { return fmt.Sprintf("return p%d.Use(s%d, BODY)", op.O, op.S) },
	},
	"sync debug": { // SyncError
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			op.Fail = g.chance(5)
			return g.depth < 2
		},
		run: func(r *runner, op *Op, _ *result) error {
			defer r.b.sys.SetSyncDebug(device.SyncError)()
			return r.body(op)()
		},
		enter: func(m *model, op *Op) (want, bool) {
			m.debugs = append(m.debugs, m.debug)
			m.debug = true
			return fine, true
		},
		leave: func(m *model, op *Op) want {
			m.debug = m.debugs[len(m.debugs)-1]
			m.debugs = m.debugs[:len(m.debugs)-1]
			return bodyWant(op)
		},
		code: func(op *Op) string {
			return "defer dev.System().SetSyncDebug(device.SyncError)()\nreturn BODY()"
		},
	},
}

func bodyWant(op *Op) want {
	if op.Fail {
		return errs(kBody)
	}
	return fine
}

// poolOf returns the pool that an allocation on the stream comes from, or nil.
func (m *model) poolOf(s *mStream) *mPool {
	if s.cap != nil {
		return s.cap.pool
	}
	if list := m.pools[s.obj]; len(list) > 0 {
		return list[len(list)-1]
	}
	return nil
}
