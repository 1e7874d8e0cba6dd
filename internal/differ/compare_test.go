package differ

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// A difference is something that two outcomes, or an outcome and the model, do not
// agree on.
type difference struct {
	Class string // "error", "data", "text", "calls", "close", "leak", "sticky" or "report"
	Op    int    // the number of the operation, or -1
	Text  string
	Sign  string // which errors there were and were wanted
}

func (d *difference) String() string { return fmt.Sprintf("%s: %s", d.Class, d.Text) }

// against compares the outcome of a backend with the model's predictions. It returns
// the first difference.
func against(p *Program, m *model, wants []want, o *outcome, backend string) *difference {
	var found *difference
	each(p.Ops, func(op *Op) {
		if found == nil {
			found = againstOne(op, &wants[op.at], &o.Results[op.at], backend)
		}
	})
	if found != nil {
		return found
	}
	if p.Fatal {
		if want := lastError(wants); o.Sticky != want {
			return &difference{"sticky", -1, fmt.Sprintf("%s: the device ends with %q, want %q", backend, o.Sticky, want), ": " + backend + " " + o.Sticky}
		}
		return nil
	}
	if d := finalState(o, backend); d != nil {
		return d
	}
	for n, got := range o.Memory {
		x := m.mem(n)
		if x == nil || x.doubt || x.closed {
			continue
		}
		if text := differs(&mOut{x.data, x.mask, 0}, got, nil); text != "" {
			return &difference{"data", -1, fmt.Sprintf("memory %d at the end: %s: %s", n, backend, text), ": " + backend}
		}
	}
	for i, n := range m.calls {
		if o.Calls[i] != int64(n) {
			return &difference{"calls", -1, fmt.Sprintf("callback %d: %s called it %d times, the model %d", i, backend, o.Calls[i], n), ": " + backend}
		}
	}
	return nil
}

func againstOne(op *Op, w *want, got *result, backend string) *difference {
	switch {
	case w.any:
	case len(w.kinds) == 0 && got.Kind != "", len(w.kinds) > 0 && !slices.Contains(w.kinds, got.Kind):
		return &difference{"error", op.at, fmt.Sprintf("%v: %s returns %q (%s), the model %q", op, backend, got.Kind, got.Err, w.kinds),
			fmt.Sprintf(": %s %q, model %q", backend, got.Kind, w.kinds)}
	case w.text != anyText && w.text != got.Text:
		return &difference{"text", op.at, fmt.Sprintf("%v: %s returns %s, the model %s", op, backend, got.Text, w.text), ": " + backend}
	case w.out != nil:
		if text := differs(w.out, got.Out, nil); text != "" {
			return &difference{"data", op.at, fmt.Sprintf("%v: %s: %s", op, backend, text), ": " + backend}
		}
	}
	return nil
}

// lastError is the last error that the model has predicted: the one that loses the
// device.
func lastError(wants []want) (kind string) {
	for _, w := range wants {
		if len(w.kinds) > 0 {
			kind = w.kinds[0]
		}
	}
	return kind
}

// finalState checks that a program leaves no memory, no error and no report behind.
func finalState(o *outcome, backend string) *difference {
	for _, c := range o.Close {
		if c.Kind != "" {
			return &difference{"close", -1, fmt.Sprintf("%s: %s", backend, c.Err), ": " + backend + " " + c.Kind}
		}
	}
	switch {
	case len(o.Reports) > 0:
		return &difference{"report", -1, fmt.Sprintf("%s: %s", backend, o.Reports[0]), ": " + backend}
	case o.Sticky != "":
		return &difference{"sticky", -1, fmt.Sprintf("%s: the device ends with %s", backend, o.Sticky), ": " + backend + " " + o.Sticky}
	case o.Stats != "":
		return &difference{"leak", -1, fmt.Sprintf("%s: there remain %s", backend, o.Stats), ": " + backend}
	}
	return nil
}

// between compares two backends with each other, also in results that the model does
// not predict.
func between(p *Program, m *model, wants []want, a, b *outcome) *difference {
	var found *difference
	each(p.Ops, func(op *Op) {
		if found != nil {
			return
		}
		w, x, y := &wants[op.at], &a.Results[op.at], &b.Results[op.at]
		switch {
		case explained(p.Fatal, op.K, x, y) != "":
		case x.Kind != y.Kind && !slices.Contains(w.kinds, ""):
			found = &difference{"error", op.at, fmt.Sprintf("%v: virtual devices return %q (%s), CUDA %q (%s)", op, x.Kind, x.Err, y.Kind, y.Err),
				fmt.Sprintf(": virtual devices %q, CUDA %q", x.Kind, y.Kind)}
		case w.text != anyText && x.Text != y.Text:
			found = &difference{"text", op.at, fmt.Sprintf("%v: virtual devices return %s, CUDA %s", op, x.Text, y.Text), ": backends"}
		case w.out != nil && x.Kind == "":
			if text := differs(w.out, y.Out, x.Out); text != "" {
				found = &difference{"data", op.at, fmt.Sprintf("%v: CUDA: %s", op, text), ": backends"}
			}
		}
	})
	if found != nil {
		return found
	}
	for n, x := range a.Memory {
		mem := m.mem(n)
		if mem == nil || mem.doubt || mem.closed || len(b.Memory[n]) != len(x) {
			continue
		}
		if text := differs(&mOut{mem.data, mem.mask, 0}, b.Memory[n], x); text != "" {
			return &difference{"data", -1, fmt.Sprintf("memory %d at the end: CUDA: %s", n, text), ": backends"}
		}
	}
	for i := range min(len(a.Close), len(b.Close)) {
		if x, y := a.Close[i], b.Close[i]; x.Kind != y.Kind && explained(p.Fatal, "", &x, &y) == "" {
			return &difference{"close", -1, fmt.Sprintf("close: virtual devices return %q (%s), CUDA %q (%s)", x.Kind, x.Err, y.Kind, y.Err), fmt.Sprintf(": %q %q", x.Kind, y.Kind)}
		}
	}
	if a.Sticky != b.Sticky {
		return &difference{"sticky", -1, fmt.Sprintf("virtual devices end with %q, CUDA with %q", a.Sticky, b.Sticky), ": backends"}
	}
	return nil
}

// differs describes the first byte that is wrong. Bytes that the model knows only
// approximately are compared with the other backend's bytes, if there are any.
func differs(want *mOut, got, other []byte) string {
	if len(got) != len(want.data) {
		return fmt.Sprintf("%d bytes, want %d", len(got), len(want.data))
	}
	for i, k := range want.mask {
		switch {
		case k == defined && got[i] != want.data[i]:
			return fmt.Sprintf("byte %d is %#02x, want %#02x", i, got[i], want.data[i])
		case k == approx && other != nil && i+4 <= len(got) && (want.at+i)%4 == 0 && wholeWord(want.mask[i:]):
			x, y := float32At(got[i:]), float32At(other[i:])
			if !close32(x, y) {
				return fmt.Sprintf("the float at byte %d is %v, and %v on virtual devices", i, x, y)
			}
		}
	}
	return ""
}

func wholeWord(mask []byte) bool {
	return !slices.ContainsFunc(mask[:4], func(k byte) bool { return k != approx })
}

func float32At(p []byte) float64 {
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(p)))
}

// close32 allows for the error of the GPU's fast logarithm and sine.
func close32(x, y float64) bool { return math.Abs(x-y) <= 1e-5+1e-5*math.Abs(y) }
