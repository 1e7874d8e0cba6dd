package analyze

import (
	"fmt"
	"math"
	"slices"
)

// sized has the length of each operation that must be the same on all ranks. A rank without an
// input or output may record 0 for it.
var sized = map[string]func(*entry) int64{
	"all_reduce": largest, "broadcast": largest, "reduce": largest, "_broadcast_oop": largest, "_reduce_oop": largest,
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

// culprits returns the members that differ from most. If there is no majority, all may be wrong.
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
