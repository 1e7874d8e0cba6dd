package kernel

import (
	"fmt"
	"math"
	"strconv"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// A Difference is an element that a kernel and its Go function leave different, or an element
// outside of an argument that one of them writes.
type Difference struct {
	Arg   int    // number of the argument
	Name  string // of the parameter in the source; "" if unknown
	Index int    // in elements
	// Outside is set if the element is before or after the argument. A side that did not write
	// it has the value "untouched".
	Outside      bool
	CUDA, Go     string  // the values
	Error, Bound float64 // the size of the difference, and the largest allowed size
}

// text describes the difference.
func (d *Difference) text() string {
	name := d.Name
	if name == "" {
		name = fmt.Sprint("argument ", d.Arg)
	}
	if d.Outside {
		return fmt.Sprintf("%s[%d], outside of the argument, is %s in CUDA and %s in Go", name, d.Index, d.CUDA, d.Go)
	}
	return fmt.Sprintf("%s[%d] is %s in CUDA and %s in Go: the error is %.3g: at most %.3g", name, d.Index, d.CUDA, d.Go, d.Error, d.Bound)
}

const untouched = "untouched"

// A VerifyError says that a kernel and its Go function differ.
type VerifyError struct {
	Kernel       string
	CUDA         string // what ran the kernel: a GPU, or the host
	Count        int    // differences in all arguments
	First, Worst Difference
}

func (e *VerifyError) Error() string {
	text := fmt.Sprintf("%s and the Go function of %s differ in %d elements; the first: %s", e.CUDA, e.Kernel, e.Count, e.First.text())
	if e.Worst != e.First {
		text += "; the worst: " + e.Worst.text()
	}
	return text
}

// compare compares the memory of both sides. It returns nil if they agree.
func (v *verification) compare(kernel string, cuda, goes []testArg) error {
	e := &VerifyError{Kernel: kernel, CUDA: v.cuda.String()}
	for i := range cuda {
		a, b := &cuda[i], &goes[i]
		if a.memory == nil {
			continue
		}
		n := len(a.value) / a.elem.Size()
		beside := guard / a.elem.Size()
		for at := -beside; at < n+beside; at++ {
			d := Difference{Arg: i, Name: a.name, Index: at, Outside: at < 0 || at >= n}
			differs := false
			if d.Outside {
				differs = d.compareGuards(a, b)
			} else if !a.hidden {
				differs = d.compareElements(a, b, v.cfg.Tolerances)
			}
			if differs {
				e.add(d)
			}
		}
	}
	if e.Count == 0 {
		return nil
	}
	return e
}

func (e *VerifyError) add(d Difference) {
	if e.Count++; e.Count == 1 {
		e.First, e.Worst = d, d
	}
	if d.excess() > e.Worst.excess() {
		e.Worst = d
	}
}

// excess orders differences by how much they exceed their bounds.
func (d *Difference) excess() float64 {
	if d.Outside {
		return math.Inf(1)
	}
	return d.Error / max(d.Bound, 1e-300)
}

// elementAt returns the bytes of an element, which may be outside of the argument.
func (a *testArg) elementAt(i int) []byte {
	size := a.elem.Size()
	return a.memory[guard+i*size:][:size]
}

// compareGuards reports whether a side has written outside of an argument.
func (d *Difference) compareGuards(a, b *testArg) bool {
	size := a.elem.Size()
	at := d.Index * size
	if at < 0 {
		at += guard
	} else {
		at -= len(a.value)
	}
	want := string(guardBytes[at:][:size])
	of := func(a *testArg) string {
		x := a.elementAt(d.Index)
		if string(x) == want {
			return untouched
		}
		return textOf(a.elem, x)
	}
	d.CUDA, d.Go = of(a), of(b)
	return d.CUDA != untouched || d.Go != untouched
}

// compareElements reports whether an element differs by more than its bound.
func (d *Difference) compareElements(a, b *testArg, tolerances map[memory.DType]Tolerance) bool {
	x, y := a.elementAt(d.Index), b.elementAt(d.Index)
	if string(x) == string(y) {
		return false
	}
	float := element.IsFloat(a.elem)
	v, w := element.Load(a.elem, x, 0), element.Load(a.elem, y, 0)
	f, g := v.Round(memory.Float64), w.Round(memory.Float64)
	if math.IsNaN(f) && math.IsNaN(g) {
		return false
	}
	d.CUDA, d.Go = textOf(a.elem, x), textOf(a.elem, y)
	d.Error = math.Abs(f - g)
	if !float {
		d.Error = max(d.Error, 1) // different integers may be the same float64
	}
	if math.IsNaN(d.Error) {
		d.Error = math.Inf(1)
	}
	tol, given := tolerances[a.elem]
	if !given {
		return true
	}
	d.Bound = tol.Abs + tol.Rel*math.Abs(f)
	if tol.ULP > 0 {
		d.Bound = max(d.Bound, float64(tol.ULP)*ulp(a.elem, f))
	}
	return math.IsInf(d.Error, 1) || !(d.Error <= d.Bound)
}

// textOf returns the value of an element.
func textOf(t memory.DType, b []byte) string {
	v := element.Load(t, b, 0)
	switch {
	case t == memory.Float64:
		return strconv.FormatFloat(v.Round(t), 'g', -1, 64)
	case element.IsFloat(t):
		return strconv.FormatFloat(v.Round(memory.Float32), 'g', -1, 32)
	case t == memory.Uint64:
		return strconv.FormatUint(uint64(v.Int64()), 10)
	}
	return strconv.FormatInt(v.Int64(), 10)
}

// A precision is the number of bits after the point of a float, and the exponent of the
// smallest normal number.
type precision struct{ bits, least int }

var precisions = map[memory.DType]precision{
	memory.Float64: {52, -1022}, memory.Float32: {23, -126}, memory.Float16: {10, -14}, memory.BFloat16: {7, -126},
	memory.Float8E4M3: {3, -6}, memory.Float8E5M2: {2, -14},
}

// ulp returns the distance of x to the next number of its type; of an integer, 1.
func ulp(t memory.DType, x float64) float64 {
	p, ok := precisions[t]
	if !ok {
		return 1
	}
	exponent := p.least
	if x != 0 {
		exponent = max(exponent, math.Ilogb(x))
	}
	return math.Ldexp(1, exponent-p.bits)
}
