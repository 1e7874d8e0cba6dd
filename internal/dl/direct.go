package dl

// DirectWords is how many arguments Direct passes.
const DirectWords = 8

// A passage is what one call by Direct needs. Assembly knows its fields.
type passage struct {
	fn    uintptr
	words [DirectWords]uintptr
}

// Direct is Call for a function that is called so often that the way to it counts: it has
// up to eight arguments, all passed by value, and returns an int. They need no frame from
// the pool, since C reads nothing of the caller's once it runs. Arguments that are not
// given are zeros.
func (t *Table[N, R]) Direct(n N, a [DirectWords]uintptr) R {
	if t.fns[n] == 0 {
		return t.absent
	}
	if t.before != 0 {
		return t.Call(n, Get().In(a[:]...))
	}
	p := passage{t.fns[n], a}
	return R(p.pass())
}
