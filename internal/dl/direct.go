package dl

// DirectWords is the number of arguments of Direct.
const DirectWords = 8

// A passage has the arguments of one call by Direct. Assembly depends on its fields.
type passage struct {
	fn    uintptr
	words [DirectWords]uintptr
}

// Direct is Call for functions that are called so often that its overhead matters. The
// function has up to eight arguments, all passed by value, and returns an int. It needs no
// frame from the pool, because C does not access memory of the caller once it runs.
// Missing arguments are zeros.
func (t *Table[N, R]) Direct(n N, a [DirectWords]uintptr) R {
	if t.fns[n] == 0 {
		return t.lacking(n)
	}
	if t.before != 0 {
		return t.Call(n, Get().In(a[:]...))
	}
	p := passage{t.fns[n], a}
	return R(p.pass())
}
