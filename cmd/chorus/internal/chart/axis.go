package chart

import (
	"math"

	"gonum.org/v1/plot"
)

// An Axis has at least two ticks, one at each end or near it.
type Axis struct {
	label     string
	low, high float64
	ticks     plot.ConstantTicks
	log       bool
}

// mostTicks limits the ticks with a text.
const mostTicks = 10

// Linear returns an axis from 0 to at least high, with a tick after each step.
func Linear(label string, high, step float64, text func(float64) string) Axis {
	a := Axis{label: label, high: max(high, step)}
	for v := 0.0; v <= a.high; v += step {
		a.ticks = append(a.ticks, plot.Tick{Value: v, Label: text(v)})
	}
	return a
}

// Powers returns a logarithmic axis that contains low and high, with ticks at powers of 2.
func Powers(label string, low, high float64, text func(float64) string) Axis {
	first, last := math.Floor(math.Log2(low)), math.Ceil(math.Log2(high))
	if first == last { // a single size is in the middle
		first, last = max(first-1, min(first, 0)), last+1
	}
	var values []float64
	for e := first; e <= last; e++ {
		values = append(values, math.Exp2(e))
	}
	return logarithmic(label, values, values, text)
}

// Decades returns a logarithmic axis that contains low and high. It has ticks at 1, 2 and 5
// times the powers of 10, or at powers of 10 if these are too many.
func Decades(label string, low, high float64, text func(float64) string) Axis {
	first, last := int(math.Floor(math.Log10(low)))-1, int(math.Ceil(math.Log10(high)))+1
	var values, powers []float64
	for e := first; e <= last; e++ {
		for _, m := range []float64{1, 2, 5} {
			v := m * math.Pow(10, float64(e))
			if v*2.5 <= low || len(values) > 1 && values[len(values)-1] >= high {
				continue // a later value, or an earlier one, is nearer
			}
			values = append(values, v)
			if m == 1 {
				powers = append(powers, v)
			}
		}
	}
	if len(values) > mostTicks {
		return logarithmic(label, values, powers, text)
	}
	return logarithmic(label, values, values, text)
}

// logarithmic returns an axis over the values, with ticks at some of the candidates.
func logarithmic(label string, values, candidates []float64, text func(float64) string) Axis {
	a := Axis{label: label, low: values[0], high: values[len(values)-1], log: true}
	every := (len(candidates) + mostTicks - 1) / mostTicks
	for i := 0; i < len(candidates); i += every {
		a.ticks = append(a.ticks, plot.Tick{Value: candidates[i], Label: text(candidates[i])})
	}
	return a
}

// apply sets an axis of gonum.
func (a *Axis) apply(to *plot.Axis) {
	to.Label.Text, to.Min, to.Max, to.Tick.Marker = a.label, a.low, a.high, a.ticks
	if a.log {
		to.Scale = plot.LogScale{}
	}
}
