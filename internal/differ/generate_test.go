package differ

import (
	"math/rand/v2"
	"slices"
)

// A generator draws a program. Each operation goes through the model at once, so
// that a draw knows all objects, and an operation that would race with another one
// gets a wait before it.
type generator struct {
	rnd     *rand.Rand
	m       *model
	last    int // the number of the last object
	depth   int // of bodies
	left    int // how many operations may still be drawn
	objects []int
	pools   []int // that captures have used
	wants   []want
	weights []int
	sum     int
}

// generate draws the program of a seed and an index.
func generate(seed uint64, index int) *Program {
	g := &generator{rnd: source(seed, index), m: newModel(), wants: make([]want, 1<<12)}
	p := &Program{Seed: seed, Index: index, Fatal: index%fatalEvery == fatalEvery-1}
	g.weigh(p.Fatal)
	for _, name := range []string{"stream new", "stream new", "make", "make"} {
		g.add(&p.Ops, name)
	}
	for _, name := range []string{"event new", "pinned new", "generator new", "pool new"} {
		if g.chance(40) {
			g.add(&p.Ops, name)
		}
	}
	g.left = 15 + g.rnd.IntN(40)
	if g.chance(3) {
		g.left *= 5
	}
	for g.left > 0 {
		g.add(&p.Ops, "")
	}
	if p.Fatal {
		g.finish(&p.Ops)
		for tries := 0; !g.m.lost && tries < 100; tries++ {
			g.add(&p.Ops, "poke")
		}
		p.Fatal = g.m.lost
		for range 10 {
			g.add(&p.Ops, "")
		}
	}
	g.finish(&p.Ops)
	p.number()
	return p
}

// fatalEvery is how many programs there are for one that loses its device.
const fatalEvery = 1000

// weigh sets how likely each kind is. The weights differ between programs, so
// that some programs have many operations that are rare in others.
func (g *generator) weigh(fatal bool) {
	for _, name := range names {
		w := kinds[name].weight * 4
		if fatal && (name == "collective" || name == "nccl group") { // its process would need a communicator
			w = 0
		}
		switch g.rnd.IntN(8) {
		case 0:
			w *= 4
		case 1:
			w /= 4
		}
		g.weights = append(g.weights, w)
		g.sum += w
	}
}

// add draws one operation, of the kind if one is named.
func (g *generator) add(list *[]Op, name string) {
	g.left--
	op := Op{K: name}
	if name == "" {
		at := g.rnd.IntN(g.sum)
		for i, w := range g.weights {
			if at -= w; at < 0 {
				op.K = names[i]
				break
			}
		}
	}
	if !kinds[op.K].draw(g, &op) {
		return
	}
	if g.m.thread == 0 && g.chance(3) {
		op.T = 1
	}
	g.emit(list, op, 3)
}

// emit adds an operation to the program, behind the waits that it needs.
func (g *generator) emit(list *[]Op, op Op, tries int) bool {
	g.m.conflict = nil
	if kinds[op.K].enter == nil || g.m.lost {
		g.m.step(&op, g.wants)
	} else {
		g.body(&op)
	}
	if g.m.conflict == nil {
		*list = append(*list, op)
		if op.R > 0 && g.m.objs[op.R] != nil {
			g.objects = append(g.objects, op.R)
			g.launches(list, op.R)
			if op.K == "capture" && g.chance(20) {
				g.updates(list, op)
			}
		}
		return true
	}
	c := *g.m.conflict
	g.m.conflict = nil
	if fix, ok := g.repair(&op, c); ok && tries > 0 && g.emit(list, fix, tries-1) {
		return g.emit(list, op, tries-1)
	}
	return false
}

// launches launches a new graph, mostly.
func (g *generator) launches(list *[]Op, x int) {
	if ok, closed := isExec(g.m.objs[x]); !ok || closed {
		return
	}
	for range g.rnd.IntN(4) {
		op := Op{K: "launch", O: x}
		if drawStream(g, &op) {
			g.emit(list, op, 3)
		}
	}
}

// updates captures the same operations with other numbers, and lets the graph have them.
func (g *generator) updates(list *[]Op, old Op) {
	if ok, closed := isExec(g.m.objs[old.R]); !ok || closed || g.depth > 0 || old.O > 0 {
		return
	}
	op := cloneOps([]Op{old})[0]
	op.R = g.number()
	if !g.again(&op) {
		return
	}
	*list = append(*list, op)
	if ok, _ := isExec(g.m.objs[op.R]); ok {
		g.objects = append(g.objects, op.R)
		g.emit(list, Op{K: "update", O: old.R, N: op.R}, 0)
		g.launches(list, old.R)
	}
}

// again executes an operation with a given body and other numbers, and leaves out
// operations that cannot be repeated.
func (g *generator) again(op *Op) bool {
	g.m.conflict = nil
	k, before := kinds[op.K], g.m.thread
	g.m.thread = max(g.m.thread, op.T)
	defer func() { g.m.thread, g.m.conflict = before, nil }()
	_, enter := k.enter(g.m, op)
	if !enter {
		return false
	}
	body := op.Do
	op.Do = nil
	for _, o := range body {
		if len(o.Do) > 0 || o.R > 0 || o.K == "end" || o.K == "abort" {
			continue
		}
		if o.K == "iota" || o.K == "axpb" || o.K == "elementwise" {
			o.A++
		}
		g.m.conflict = nil
		g.m.step(&o, g.wants)
		if g.m.conflict == nil {
			op.Do = append(op.Do, o)
		}
	}
	g.m.conflict = nil
	k.leave(g.m, op)
	return true
}

// body draws the operations of a function that is an argument.
func (g *generator) body(op *Op) {
	k, before := kinds[op.K], g.m.thread
	g.m.thread = max(g.m.thread, op.T)
	if _, enter := k.enter(g.m, op); enter {
		g.depth++
		for range 1 + g.rnd.IntN(14) {
			g.add(&op.Do, "")
		}
		g.depth--
		k.leave(g.m, op)
	} else if g.chance(50) {
		op.Do = append(op.Do, Op{K: "stats"}) // is not called
	}
	g.m.thread = before
}

// repair returns an operation that orders two operations in conflict.
func (g *generator) repair(op *Op, c conflict) (Op, bool) {
	if c.with != nil && c.with.cap == c.s.cap && c.with != c.s {
		return Op{K: "stream wait stream", S: c.s.obj, O: c.with.obj}, true
	}
	if c.slot <= 0 {
		return Op{}, false
	}
	other := g.m.slots[c.slot]
	usable := !other.closed && other.cap == nil
	switch {
	case op.K == "close" && g.chance(40) && !other.closed:
		return Op{K: "record stream", O: op.O, S: other.obj}, true
	case c.s != nil && !c.s.closed && c.s.cap == nil && usable && g.chance(80):
		return Op{K: "stream wait stream", S: c.s.obj, O: other.obj}, true
	case usable && !g.m.debug:
		return Op{K: "stream sync", S: other.obj}, true
	case len(g.m.open) == 0:
		return Op{K: "device sync"}, true
	}
	return Op{}, false
}

// finish ends the captures that are open, on the threads that began them.
func (g *generator) finish(list *[]Op) {
	for _, n := range slices.Clone(g.objects) {
		if c := object[mCapture](g.m, n); c != nil && !c.ended {
			op := Op{K: "abort", O: n, T: c.thread}
			if g.chance(50) {
				op = Op{K: "end", O: n, R: g.number(), T: c.thread}
			}
			g.emit(list, op, 0)
		}
	}
}

func (g *generator) number() int { g.last++; return g.last }

func (g *generator) chance(percent int) bool { return g.rnd.IntN(100) < percent }

// length draws a number of elements.
func (g *generator) length() int {
	switch g.rnd.IntN(20) {
	case 0:
		return 0
	case 1:
		return 1000 + g.rnd.IntN(20000)
	case 2:
		if g.chance(10) {
			return 300000 + g.rnd.IntN(100000)
		}
	}
	return []int{1, 2, 3, 5, 16, 31, 64, 100, 128, 255, 256, 257, 300, 1000}[g.rnd.IntN(14)]
}

func (g *generator) mode() int64 {
	switch g.rnd.IntN(12) {
	case 0:
		return 1
	case 1, 2:
		return 2
	}
	return 0
}

// A class chooses objects; closed ones are chosen seldom.
type class func(o any) (ok, closed bool)

func isStream(o any) (ok, closed bool)    { s, ok := o.(*mStream); return ok, ok && s.closed }
func isEvent(o any) (ok, closed bool)     { e, ok := o.(*mEvent); return ok, ok && e.closed }
func isGen(o any) (ok, closed bool)       { _, ok = o.(*mGen); return ok, false }
func isPool(o any) (ok, closed bool)      { p, ok := o.(*mPool); return ok, ok && p.closed }
func isRecording(o any) (ok, closed bool) { c, ok := o.(*mCapture); return ok, ok && c.ended }

func isExec(o any) (ok, closed bool) {
	x, ok := o.(*mExec)
	return ok && !x.doubt, ok && x.closed
}

func isBuf(o any) (ok, closed bool) {
	x, ok := o.(*mMem)
	return ok && !x.pinned && !x.doubt, ok && x.closed
}

func isPinned(o any) (ok, closed bool) {
	x, ok := o.(*mMem)
	return ok && x.pinned, ok && x.closed
}

// count is how many open objects of a class there are.
func (g *generator) count(of class) (n int) {
	for _, o := range g.objects {
		if ok, closed := of(g.m.objs[o]); ok && !closed {
			n++
		}
	}
	return n
}

// any chooses an object.
func (g *generator) any(n *int, of class) bool {
	var all, open, near []int
	for _, o := range g.objects {
		ok, closed := of(g.m.objs[o])
		if !ok {
			continue
		}
		all = append(all, o)
		if !closed {
			open = append(open, o)
			if s, ok := g.m.objs[o].(*mStream); ok && s.cap != nil {
				near = append(near, o)
			}
		}
	}
	switch {
	case len(all) == 0:
		return false
	case len(near) > 0 && g.chance(70):
		open = near
	case len(open) == 0 || g.chance(4):
		open = all
	}
	*n = open[g.rnd.IntN(len(open))]
	return true
}

// part chooses a part of device memory, rather of the stream's own.
func (g *generator) part(x *Ref, s int) bool {
	of := isBuf
	if g.chance(60) && slices.ContainsFunc(g.objects, func(o int) bool { ok, _ := g.ownBuf(s)(g.m.objs[o]); return ok }) {
		of = g.ownBuf(s)
	}
	if !g.any(&x.O, of) {
		return false
	}
	g.bounds(x, len(g.m.mem(x.O).data), 1)
	return true
}

func (g *generator) ownBuf(s int) class {
	return func(o any) (ok, closed bool) {
		ok, closed = isBuf(o)
		return ok && o.(*mMem).s == g.m.stream(s), closed
	}
}

// bounds chooses a part of n bytes, of whole elements of a width.
func (g *generator) bounds(x *Ref, n, width int) {
	x.Lo, x.Hi = 0, n/width*width
	if g.chance(50) {
		k := n / width
		x.Lo = width * g.rnd.IntN(k+1)
		x.Hi = x.Lo + width*g.rnd.IntN(k-x.Lo/width+1)
	}
	if g.chance(1) {
		x.Hi += width * (1 + g.rnd.IntN(3)) // perhaps too far
	}
	if g.chance(1) && x.Lo > 0 {
		x.Lo, x.Hi = x.Lo-1, x.Hi-1 // not at a multiple
	}
}

// words chooses a part of device memory that has whole words.
func (g *generator) words(x *Ref, s int) bool {
	if !g.part(x, s) {
		return false
	}
	g.bounds(x, len(g.m.mem(x.O).data), 4)
	return true
}

// twoWords chooses a stream and two parts of the same length.
func (g *generator) twoWords(op *Op) bool {
	if !drawStream(g, op) || !g.words(&op.X, op.S) || !g.words(&op.Y, op.S) {
		return false
	}
	if !g.chance(2) {
		g.sameLength(&op.X, &op.Y)
	}
	return true
}

// host chooses a part of pinned memory.
func (g *generator) host(x *Ref) bool {
	if !g.any(&x.O, isPinned) {
		return false
	}
	g.bounds(x, len(g.m.mem(x.O).data), 1)
	return true
}

func (g *generator) sameLength(x, y *Ref) {
	n := max(min(x.len(), y.len()), 0)
	x.Hi, y.Hi = x.Lo+n, y.Lo+n
}

// freshPool chooses now and then a pool that no capture has used.
func (g *generator) freshPool(n *int) {
	var p int
	if g.chance(15) && g.any(&p, isPool) && !slices.Contains(g.pools, p) {
		*n = p
		g.pools = append(g.pools, p)
	}
}
