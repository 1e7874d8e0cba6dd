package differ

import "time"

// shrink removes operations from a program as long as it fails in the same way.
func shrink(p *Program, fails func(*Program) bool, limit time.Duration) *Program {
	s := &shrinker{best: p, fails: fails, until: time.Now().Add(limit)}
	for again := true; again; {
		again = s.dropRuns()
		again = s.inner() || again
		again = s.simplify() || again
	}
	s.best.number()
	return s.best
}

type shrinker struct {
	best  *Program
	fails func(*Program) bool
	until time.Time
}

// try takes a smaller program if it fails too.
func (s *shrinker) try(p *Program) bool {
	if time.Now().After(s.until) {
		return false
	}
	p.number()
	if !s.fails(p) {
		return false
	}
	s.best = p
	return true
}

// dropRuns leaves out runs of operations, long ones first.
func (s *shrinker) dropRuns() (changed bool) {
	for n := len(s.best.Ops) / 2; n > 0; n /= 2 {
		for at := len(s.best.Ops) - n; at >= 0; at-- {
			if at+n > len(s.best.Ops) {
				continue
			}
			p := s.best.clone()
			p.Ops = append(p.Ops[:at], p.Ops[at+n:]...)
			changed = s.try(p) || changed
		}
	}
	return changed
}

// inner leaves out operations of bodies.
func (s *shrinker) inner() (changed bool) {
	for i := len(s.best.Ops) - 1; i >= 0; i-- {
		for j := len(s.best.Ops[i].Do) - 1; j >= 0; j-- {
			p := s.best.clone()
			do := p.Ops[i].Do
			p.Ops[i].Do = append(do[:j], do[j+1:]...)
			changed = s.try(p) || changed
			for k := range s.best.Ops[i].Do {
				for l := len(s.best.Ops[i].Do[k].Do) - 1; l >= 0; l-- {
					p := s.best.clone()
					do := p.Ops[i].Do[k].Do
					p.Ops[i].Do[k].Do = append(do[:l], do[l+1:]...)
					changed = s.try(p) || changed
				}
			}
		}
	}
	return changed
}

// simplify simplifies operations: on one thread, with fewer streams, on less
// memory.
func (s *shrinker) simplify() (changed bool) {
	for _, simpler := range simplifications {
		for at := range s.best.number() {
			p, done := s.best.clone(), false
			each(p.Ops, func(op *Op) {
				if op.at == at {
					done = simpler(op)
				}
			})
			if done {
				changed = s.try(p) || changed
			}
		}
	}
	return changed
}

var simplifications = []func(*Op) bool{
	func(op *Op) bool { done := op.T != 0; op.T = 0; return done },
	func(op *Op) bool { done := op.Fail; op.Fail = false; return done },
	func(op *Op) bool {
		done := len(op.V) > 1
		if done {
			op.V = op.V[:len(op.V)-1]
		}
		return done
	},
	func(op *Op) bool {
		done := op.K == "make" && op.N > 4
		if done {
			op.N = 4
		}
		return done
	},
	func(op *Op) bool { return narrow(op, func(n int) int { return n / 8 * 4 }) },
	func(op *Op) bool { return narrow(op, func(n int) int { return min(n, 4) }) },
	func(op *Op) bool { done := op.X.Lo > 0; op.X.Hi -= op.X.Lo; op.X.Lo = 0; return done },
	func(op *Op) bool { done := op.Y.Lo > 0; op.Y.Hi -= op.Y.Lo; op.Y.Lo = 0; return done },
}

// narrow shortens the memory that an operation uses.
func narrow(op *Op, shorter func(int) int) bool {
	n := shorter(op.X.len())
	if n >= op.X.len() || n < 1 {
		return false
	}
	if op.Y.len() == op.X.len() {
		op.Y.Hi = op.Y.Lo + n
	}
	op.X.Hi = op.X.Lo + n
	return true
}
