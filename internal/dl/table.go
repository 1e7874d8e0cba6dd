package dl

// A Func is a C function of a library.
type Func struct {
	Name     string
	Optional bool // the library may lack it
}

// A Table holds the functions of a loaded library, indexed by the numbers N of a package.
// R is the library's status type: an int, or a struct of two ints, which is returned in
// one register.
type Table[N ~int, R ~int32 | ~uint64] struct {
	fns    []uintptr
	path   string
	absent R

	before, subject uintptr // see After
	asked           *N      // see Empty
}

// NewTable looks up the functions and returns the names of the required functions that are
// missing. A call of a missing optional function returns absent. path is the file of the
// library.
func NewTable[N ~int, R ~int32 | ~uint64](find Resolver, path string, funcs []Func, absent R) (t Table[N, R], missing []string) {
	t = Table[N, R]{fns: make([]uintptr, len(funcs)), path: path, absent: absent}
	for i, f := range funcs {
		p, ok := find(f.Name)
		if !ok && !f.Optional {
			missing = append(missing, f.Name)
		}
		t.fns[i] = p
	}
	return t, missing
}

// Require is NewTable for a library whose required functions all came with the
// version spec.Needed. If one is missing, it returns a *VersionError.
func Require[N ~int, R ~int32 | ~uint64](find Resolver, path string, spec *Spec, funcs []Func, absent R) (Table[N, R], error) {
	t, missing := NewTable[N](find, path, funcs, absent)
	if len(missing) > 0 {
		return t, &VersionError{Library: spec.Name, Path: path, Needed: spec.Needed, Missing: missing}
	}
	return t, nil
}

// A Versioned is a C function and the version code of the library that first had it.
type Versioned = struct {
	Name  string
	Since int32
}

// Since returns the functions for NewTable, and requires those that the version
// min has.
func Since(all []Versioned, min int32) []Func {
	funcs := make([]Func, len(all))
	for i, f := range all {
		funcs[i] = Func{Name: f.Name, Optional: f.Since > min}
	}
	return funcs
}

// Empty returns a table of a library that lacks every function. first is the function that
// was called first, or negative before the first call. A package uses it to learn which
// function some code calls, without calling it.
func Empty[N ~int, R ~int32 | ~uint64](funcs int, absent R) (t Table[N, R], first *N) {
	first = new(N)
	*first = -1
	return Table[N, R]{fns: make([]uintptr, funcs), absent: absent, asked: first}, first
}

// lacking returns the result for a function that the library lacks.
func (t *Table[N, R]) lacking(n N) R {
	if t.asked != nil && *t.asked < 0 {
		*t.asked = n
	}
	return t.absent
}

// After returns a table whose calls are each preceded by a call of function n with the
// subject. Both calls are one change to C, so the goroutine cannot change its thread
// between them. If function n returns a nonzero result, that is the result, and the second
// call is not made. On processors other than amd64 the goroutine must be locked to its
// thread.
func (t Table[N, R]) After(n N, subject uintptr) Table[N, R] {
	t.before, t.subject = t.fns[n], subject
	return t
}

// Path returns the file that was loaded.
func (t *Table[N, R]) Path() string { return t.path }

// Has reports whether the loaded library has the function.
func (t *Table[N, R]) Has(n N) bool { return t.fns[n] != 0 }

// Call calls a function without out-parameters and returns the frame to the pool.
func (t *Table[N, R]) Call(n N, f *Frame) R {
	if !t.Has(n) {
		f.Put()
		return t.lacking(n)
	}
	f.before, f.subject = t.before, t.subject
	return R(f.do(t.fns[n]))
}

// Call1 is Call for a function with one out-parameter.
func (t *Table[N, R]) Call1(n N, f *Frame) (uint64, R) {
	if !t.Has(n) {
		f.Put()
		return 0, t.lacking(n)
	}
	f.before, f.subject = t.before, t.subject
	v, r := f.do1(t.fns[n])
	return v, R(r)
}

// Call2 is Call for a function with two out-parameters.
func (t *Table[N, R]) Call2(n N, f *Frame) (uint64, uint64, R) {
	if !t.Has(n) {
		f.Put()
		return 0, 0, t.lacking(n)
	}
	f.before, f.subject = t.before, t.subject
	v, w, r := f.do2(t.fns[n])
	return v, w, R(r)
}

// Text calls a function that returns a NUL-terminated string, which is "" if
// the function is missing, and returns the frame to the pool.
func (t *Table[N, R]) Text(n N, f *Frame) string {
	if !t.Has(n) {
		f.Put()
		return ""
	}
	return f.DoString(t.fns[n])
}

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
func (t *Table[N, R]) Direct(n N, a *[DirectWords]uintptr) R {
	if t.fns[n] == 0 {
		return t.lacking(n)
	}
	if t.before != 0 {
		return t.Call(n, Get().In(a[:]...))
	}
	p := passage{t.fns[n], *a}
	return R(p.pass())
}
