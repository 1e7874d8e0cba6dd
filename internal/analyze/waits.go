package analyze

import (
	"fmt"
	"math"
	"slices"
)

// A wait says that one rank waits until another one issues an operation.
type wait struct {
	from, to *node
	group    *group
	op       *entry // of from
	behind   *entry // the operation of to behind which the one that from waits for is queued, or nil
}

func (w *wait) text() string {
	return fmt.Sprintf("%s waits for %s in %s of %s", w.from.name, w.to.name, w.op.position(), w.group.name)
}

// position returns a text such as "collective 7 (all_reduce(8 x Float, sum))".
func (e *entry) position() string {
	switch {
	case e.peer < 0:
		return fmt.Sprintf("collective %d (%s)", e.seq, e.call())
	case e.sends:
		return fmt.Sprintf("%s to rank %d", e.call(), e.peer)
	}
	return fmt.Sprintf("%s from rank %d", e.call(), e.peer)
}

// A stuck is the collective of a group that does not complete.
type stuck struct {
	group   *group
	op      *entry // of one of the issuers
	seq     uint64
	issuers []*member // they have issued it
	behind  []*member // they have not
	done    []*member // of the issuers those that completed it
}

// stuck returns the collective that the group hangs in, or nil. The host notices completions
// late, so an earlier collective may seem to be pending on a rank. A collective is known to be over
// if a rank has completed a later one.
func (g *group) stuck() *stuck {
	var seq, completed uint64
	for _, m := range g.present() {
		if e := m.pending(); e != nil && e.seq > seq {
			seq = e.seq
		}
		completed = max(completed, m.completed())
	}
	if seq == 0 {
		return nil
	}
	s := g.collective(seq)
	if len(s.behind) > 0 || completed < seq {
		return s
	}
	// All ranks have issued the collectives up to completed. If a rank has not issued the next
	// one, the others wait for it.
	if next := g.collective(completed + 1); len(next.behind) > 0 && next.op != nil {
		return next
	}
	return s
}

// collective returns what the ranks have done with a collective.
func (g *group) collective(seq uint64) *stuck {
	s := &stuck{group: g, seq: seq}
	for _, m := range g.present() {
		ops := m.at(seq)
		if m.last < seq {
			s.behind = append(s.behind, m)
			continue
		}
		s.issuers = append(s.issuers, m)
		if len(ops) == 0 {
			continue
		}
		last := &ops[len(ops)-1]
		if last.completed {
			s.done = append(s.done, m)
		}
		if s.op == nil || !last.completed {
			s.op = last
		}
	}
	return s
}

// head returns the first operation that is not known to have completed, or nil. The operations of a
// communicator run in the order in which they were issued.
func (m *member) head() *entry {
	last := -1
	for i := range m.list {
		if e := &m.list[i]; e.completed && !e.captured {
			last = i
		}
	}
	return firstRunning(m.list[last+1:])
}

// waitsBehindItself reports whether an operation is queued behind another operation of the communicator.
// PyTorch's dumps do not say which operations are of one batch.
func (m *member) waitsBehindItself(e *entry) bool {
	h := m.head()
	return h != nil && h.batch != 0 && h.record != e.record && !h.inBatchWith(e)
}

// inBatchWith reports whether two operations of a member start together.
func (e *entry) inBatchWith(o *entry) bool {
	return e.record == o.record || e.batch != 0 && e.batch == o.batch
}

// completed returns the number of the last collective that is known to have completed.
func (m *member) completed() (seq uint64) {
	for i := range m.colls {
		if e := &m.colls[i]; e.completed && !e.captured {
			seq = max(seq, e.seq)
		}
	}
	return seq
}

// pending returns the first collective that is not known to have completed, or nil. Completions
// are in order, so all collectives before the last completed one are over.
func (m *member) pending() *entry {
	for i := len(m.colls) - 1; i >= 0; i-- {
		if e := &m.colls[i]; e.completed {
			return firstRunning(m.colls[i+1:])
		}
	}
	return firstRunning(m.colls)
}

func firstRunning(list []entry) *entry {
	for i := range list {
		if !list[i].captured && !list[i].completed {
			return &list[i]
		}
	}
	return nil
}

// waits returns the waits of the issuers for other ranks. A rank without a file counts only if all
// others have issued the operation.
func (j *Job) waits(s *stuck) (list []wait) {
	add := func(to *node) {
		for _, m := range s.issuers[:min(len(s.issuers), mostNamed)] {
			if e := m.pending(); e != nil && e.seq <= s.seq {
				if ops := m.at(s.seq); len(ops) > 0 {
					e = &ops[0]
				}
				list = append(list, wait{m.node, to, s.group, e, nil})
			}
		}
	}
	for _, m := range s.behind {
		add(m.node)
	}
	if len(s.behind) == 0 {
		for _, n := range j.absent(s.group) {
			add(n)
		}
	}
	return list
}

// A graph has the waits of all ranks. Each rank counts by its name.
type graph struct {
	waits []wait
	out   map[string][]*wait
}

func newGraph(waits []wait) *graph {
	g := &graph{waits, map[string][]*wait{}}
	for i := range waits {
		w := &waits[i]
		g.out[w.from.name] = append(g.out[w.from.name], w)
	}
	return g
}

// cycle returns waits that form a cycle, or nil, and visits each rank once,
// without recursion.
func (g *graph) cycle() []*wait {
	const onPath, done = 1, 2
	state := map[string]int{}
	for i := range g.waits {
		start := g.waits[i].from.name
		if state[start] != 0 {
			continue
		}
		next, path := map[string]int{}, []*wait{}
		state[start] = onPath
		for at := start; ; {
			k := next[at]
			if next[at]++; k == len(g.out[at]) {
				state[at] = done
				if len(path) == 0 {
					break
				}
				at, path = path[len(path)-1].from.name, path[:len(path)-1]
				continue
			}
			w := g.out[at][k]
			switch path = append(path, w); state[w.to.name] {
			case onPath:
				from := slices.IndexFunc(path, func(p *wait) bool { return p.from.name == w.to.name })
				return path[from:]
			case done:
				path = path[:len(path)-1]
			default:
				at = w.to.name
				state[at] = onPath
			}
		}
	}
	return nil
}

// sinks returns the waits for ranks that wait for no rank. blocked has the ranks that wait for
// an operation that all ranks have issued.
func (g *graph) sinks(blocked map[*node]bool) (list []*wait) {
	for i := range g.waits {
		w := &g.waits[i]
		known := slices.ContainsFunc(list, func(x *wait) bool { return x.to.name == w.to.name })
		if !known && len(g.out[w.to.name]) == 0 && !blocked[w.to] {
			list = append(list, w)
		}
	}
	return list
}

// inversion returns two groups whose pending collectives ranks have issued in different orders, or ok false. The ranks in first have
// issued the one of a first, and those in second, which are not more, the one of b.
func inversion(list []*stuck) (a, b *stuck, first, second []*node, ok bool) {
	for i, a := range list[:min(len(list), mostPairs)] {
		for _, b := range list[i+1 : min(len(list), mostPairs)] {
			var order [2][]*node // the ranks that issued a first, and those that issued b first
			for _, m := range a.issuers {
				at, bt := m.created(a), int64(math.MaxInt64)
				for _, o := range b.issuers {
					if o.node == m.node {
						bt = o.created(b)
					}
				}
				switch {
				case at == math.MaxInt64 || bt == math.MaxInt64 || at == bt:
				case at < bt:
					order[0] = append(order[0], m.node)
				default:
					order[1] = append(order[1], m.node)
				}
			}
			switch {
			case order[0] == nil || order[1] == nil:
			case len(order[0]) < len(order[1]):
				return b, a, order[1], order[0], true
			default:
				return a, b, order[0], order[1], true
			}
		}
	}
	return nil, nil, nil, nil, false
}

// mostPairs limits the groups that are compared with each other.
const mostPairs = 256

// created returns when the member issued the collective, or MaxInt64.
func (m *member) created(s *stuck) int64 {
	if ops := m.at(s.seq); len(ops) > 0 {
		return ops[0].created
	}
	return math.MaxInt64
}

// sized has the length of each operation that must be the same on all ranks. A rank without an
// input or output may record 0 for it.
var sized = map[string]func(*entry) int64{
	"all_reduce": largest, "quantized_all_reduce": largest, "all_reduce_and_norm": largest, "broadcast": largest, "reduce": largest, "_broadcast_oop": largest, "_reduce_oop": largest,
	"gather": input, "_all_gather_base": input, "all_gather_into_tensor_coalesced": input,
	"all_to_all": input, "scatter": output, "_reduce_scatter_base": output,
}

func largest(e *entry) int64 { return max(e.in, e.out) }
func input(e *entry) int64   { return e.in }
func output(e *entry) int64  { return e.out }

// differs returns which property of two operations differs, or "".
func differs(a, b *entry) string {
	size := sized[a.op]
	switch {
	case a.op != b.op:
		return "operation"
	case a.dtype != b.dtype:
		return "type"
	case a.format != b.format:
		return "format"
	case a.options != b.options:
		return "options"
	case a.reduction != b.reduction:
		return "reduction"
	case a.root != b.root:
		return "root"
	case a.uneven != b.uneven:
		return "operation"
	case size != nil && !a.uneven && size(a) != size(b):
		return "size"
	}
	return ""
}

func differ(a, b []entry) string {
	if len(a) != len(b) {
		return "number of operations in one call"
	}
	for i := range a {
		if what := differs(&a[i], &b[i]); what != "" {
			return what
		}
	}
	return ""
}

// A class is the members that issued the same operation.
type class struct {
	members []*member
	ops     []entry
}

// A mismatch is the first difference of the operations of a group.
type mismatch struct {
	group   *group
	seq     uint64
	what    string
	classes []class // the most common first
}

// mismatch compares the collectives that all rings still hold.
func (g *group) mismatch() *mismatch {
	list := g.present()
	from := uint64(1)
	for _, m := range list {
		from = max(from, m.first)
	}
	at := make([]int, len(list)) // the position in each member's collectives
	for i, m := range list {
		at[i] = m.index(from)
	}
	for {
		seq, more := next(list, at)
		if !more {
			return nil
		}
		classes := classify(list, at, seq)
		if len(classes) > 1 {
			slices.SortStableFunc(classes, func(a, b class) int { return len(b.members) - len(a.members) })
			return &mismatch{g, seq, differ(classes[0].ops, classes[1].ops), classes}
		}
	}
}

// next returns the smallest number at the positions.
func next(list []*member, at []int) (seq uint64, more bool) {
	seq = math.MaxUint64
	for i, m := range list {
		if at[i] < len(m.colls) {
			seq, more = min(seq, m.colls[at[i]].seq), true
		}
	}
	return seq, more
}

// classify divides the members by the operation that they issued under a number, and moves
// their positions behind it.
func classify(list []*member, at []int, seq uint64) (classes []class) {
	for i, m := range list {
		end := at[i]
		for end < len(m.colls) && m.colls[end].seq == seq {
			end++
		}
		if end == at[i] {
			continue // not issued
		}
		ops := m.colls[at[i]:end]
		at[i] = end
		k := slices.IndexFunc(classes, func(c class) bool { return differ(c.ops, ops) == "" })
		if k < 0 {
			k, classes = len(classes), append(classes, class{ops: ops})
		}
		classes[k].members = append(classes[k].members, m)
	}
	return classes
}

// culprits returns the members that differ from most, or all members if there
// is no majority.
func (x *mismatch) culprits() (list []*member) {
	from := 1
	if len(x.classes[0].members) == len(x.classes[1].members) {
		from = 0
	}
	for _, c := range x.classes[from:] {
		list = append(list, c.members...)
	}
	return list
}

func (x *mismatch) text() string {
	text := fmt.Sprintf("The ranks of %s differ in collective %d, in the %s: ", x.group.name, x.seq, x.what)
	for i, c := range x.classes[:min(len(x.classes), mostNamed)] {
		if i > 0 {
			text += "; "
		}
		text += fmt.Sprintf("%s issued %s%s", names(c.members), c.ops[0].call(), place(&c.ops[0]))
	}
	text += "."
	if x.skipped() {
		text += fmt.Sprintf(" The next collective of the other ranks is the same as this one of %s: it may have skipped collective %d.", names(x.classes[1].members), x.seq)
	}
	if len(x.classes[0].members) == len(x.classes[1].members) {
		return text + " There is no majority, so each side may be wrong: compare the programs at these operations."
	}
	return text + fmt.Sprintf(" %s differs from the majority: look at its program at this operation.", upper(names(x.culprits())))
}

// skipped reports whether the ranks that differ issued the majority's next collective.
func (x *mismatch) skipped() bool {
	next := x.classes[0].members[0].at(x.seq + 1)
	return len(x.classes) == 2 && len(next) > 0 && differ(next, x.classes[1].ops) == ""
}
