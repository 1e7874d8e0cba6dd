package comm_test

import (
	"fmt"
	"math/rand/v2"
	"unsafe"

	"github.com/gochorus/chorus/nccl"
)

// A mixedOp is one operation of all ranks in a round of TestMixedOperations. Its places
// are bytes of the round's destinations, or of the sources that all rounds have.
type mixedOp struct {
	kind    string
	wide    bool // int32, or else uint8
	op      nccl.Op
	root    int
	n       int // elements of one rank's part
	dst     int
	src     int
	chained bool // src lies among the destinations: an earlier operation has written it
	inPlace bool // what the operation reads is copied to its destination before
	batch   int  // operations of the same one, if it is not 0, are issued as a group
}

func (o mixedOp) String() string {
	return fmt.Sprintf("%s %s of %d elements (wide %v) from %d to %d, root %d, chained %v, in place %v, batch %d",
		o.kind, o.op, o.n, o.wide, o.src, o.dst, o.root, o.chained, o.inPlace, o.batch)
}

func (o *mixedOp) size() int {
	if o.wide {
		return 4
	}
	return 1
}

// elements is how many a rank's destination and source have.
func (o *mixedOp) elements(ranks int) (dst, src int) {
	dst, src = o.n, o.n
	switch o.kind {
	case "all-gather":
		dst *= ranks
	case "reduce-scatter":
		src *= ranks
	case "all-to-all":
		dst, src = dst*ranks, src*ranks
	}
	return dst, src
}

// own is where a rank's source begins in its destination, in place.
func (o *mixedOp) own(rank int) int {
	if o.kind == "all-gather" {
		return rank * o.n * o.size()
	}
	return 0
}

// A mixer draws operations.
type mixer struct {
	rng   *rand.Rand
	ranks int
	pool  int // bytes of the sources
	// switches are numbers of bytes around which something else carries operations out:
	// all-reduces, and the others by a rank's part. Those above rare are drawn seldom.
	switches, partSwitches []int
	rare                   int
}

// round draws so many operations, or as many as fit in room bytes, and returns how many
// bytes they take.
func (m *mixer) round(ops, room int) (list []mixedOp, used int) {
	batches := 0
	for len(list) < ops {
		size := 1
		if m.rng.IntN(8) == 0 {
			batches++
			size = 2 + m.rng.IntN(2)
		}
		from := len(list)
		for range size {
			o := m.draw()
			o.dst = (used + m.rng.IntN(20) + 3) &^ 3 // of any alignment that int32 has
			if !o.wide {
				o.dst += m.rng.IntN(4)
			}
			dst, src := o.elements(m.ranks)
			if used = o.dst + dst*o.size(); used > room {
				return list, min(used, room)
			}
			o.src = m.rng.IntN((m.pool-src*o.size())/4+1) * 4
			if size > 1 {
				o.batch = batches
			} else {
				m.link(&o, list[:from])
			}
			list = append(list, o)
		}
	}
	return list, used
}

// link lets some operations read what an earlier one has written, and others be in place.
func (m *mixer) link(o *mixedOp, before []mixedOp) {
	switch _, src := o.elements(m.ranks); {
	case m.rng.IntN(3) == 0 && len(before) > 0:
		x := before[m.rng.IntN(len(before))]
		dst, _ := x.elements(m.ranks)
		if src*o.size() <= dst*x.size() && x.dst%o.size() == 0 {
			o.src, o.chained = x.dst, true
		}
	case m.rng.IntN(4) == 0:
		o.inPlace = o.kind == "all-reduce" || o.kind == "broadcast" || o.kind == "all-gather"
	}
}

func (m *mixer) draw() (o mixedOp) {
	kinds := []string{"all-reduce", "all-reduce", "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"}
	o.kind, o.root = kinds[m.rng.IntN(len(kinds))], m.rng.IntN(m.ranks)
	o.wide = m.rng.IntN(2) == 0
	ops := []nccl.Op{nccl.Sum, nccl.Min}
	if o.wide {
		ops[1] = nccl.Max
	}
	o.op = ops[m.rng.IntN(2)]
	o.n = max(m.bytes(o.kind)/o.size(), 1)
	return o
}

// bytes draws a size: mostly a small one, or one around a switch point, with tails.
func (m *mixer) bytes(kind string) int {
	if m.rng.IntN(4) != 0 {
		return 1 + m.rng.IntN(1<<(1+m.rng.IntN(10)))
	}
	list := m.partSwitches
	if kind == "all-reduce" {
		list = m.switches
	}
	at := list[m.rng.IntN(len(list))]
	if at > m.rare && m.rng.IntN(1+at/m.rare) != 0 {
		at = list[0]
	}
	return max(at+[]int{0, 0, 1, 3, 4, 7, 8, 9, 12, 15, 16, 17, -1, -4, -8, -16}[m.rng.IntN(16)], 1)
}

// A mixedModel says what all ranks have after a round.
type mixedModel struct {
	pools [][]byte // the sources, by rank
	dsts  [][]byte // what the round leaves, by rank
}

// run carries the operations out.
func (m *mixedModel) run(ops []mixedOp, used int) {
	for r := range m.dsts {
		m.dsts[r] = m.dsts[r][:used]
		clear(m.dsts[r])
	}
	ins := make([][]byte, len(m.dsts))
	for i := range ops {
		o := &ops[i]
		dst, src := o.elements(len(ins))
		for r := range ins {
			ins[r] = m.pools[r][o.src : o.src+src*o.size()]
			if o.chained {
				ins[r] = m.dsts[r][o.src : o.src+src*o.size()]
			}
		}
		m.carryOut(o, ins, o.dst, o.dst+dst*o.size())
	}
}

func (m *mixedModel) carryOut(o *mixedOp, ins [][]byte, from, to int) {
	part := o.n * o.size()
	for r := range ins {
		out := m.dsts[r][from:to]
		switch o.kind {
		case "all-reduce":
			if r > 0 {
				copy(out, m.dsts[0][from:to])
			} else {
				o.reduce(out, ins, 0)
			}
		case "reduce-scatter":
			o.reduce(out, ins, r*part)
		case "broadcast":
			copy(out, ins[o.root])
		case "all-gather":
			for k := range ins {
				copy(out[k*part:], ins[k])
			}
		case "all-to-all":
			for k := range ins {
				copy(out[k*part:(k+1)*part], ins[k][r*part:])
			}
		}
	}
}

// reduce joins len(out) bytes of all inputs, from a place on.
func (o *mixedOp) reduce(out []byte, ins [][]byte, at int) {
	copy(out, ins[0][at:at+len(out)])
	for _, in := range ins[1:] {
		if o.wide {
			joinMixed(wideOf(out), wideOf(in[at:at+len(out)]), o.op)
		} else {
			joinMixed(out, in[at:at+len(out)], o.op)
		}
	}
}

func wideOf(b []byte) []int32 {
	return unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

func joinMixed[T int32 | uint8](out, in []T, op nccl.Op) {
	switch op {
	case nccl.Sum:
		for i, x := range in {
			out[i] += x
		}
	case nccl.Max:
		for i, x := range in {
			out[i] = max(out[i], x)
		}
	case nccl.Min:
		for i, x := range in {
			out[i] = min(out[i], x)
		}
	}
}
