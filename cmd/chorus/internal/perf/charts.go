package perf

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/gochorus/chorus/cmd/chorus/internal/chart"
)

// charts returns charts of the bandwidths and times of all operations.
func (r *Report) charts() (list []*chart.Chart) {
	for _, c := range []*chart.Chart{
		r.chart("Bus bandwidth", "GB/s", func(m *Measure) float64 { return m.BusBW }),
		r.chart("Time of an operation", "us", func(m *Measure) float64 { return m.Time }),
		r.chart("99th percentile of single operations", "us", func(m *Measure) float64 { return m.P99 }),
	} {
		if c != nil {
			list = append(list, c)
		}
	}
	return list
}

// A curve shows one side of an operation over the size.
type curve struct {
	features []string // one text for each kind of feature; "" if it does not apply
	points   []chart.Point
}

// features describes a side of a row in words, without its size.
func (r *Row) features(inPlace bool) []string {
	list := []string{strings.ReplaceAll(r.Operation, "_", "-"), r.Type, "", "", r.Strategy, "out of place"}
	if r.Reduction != Moves.String() {
		list[2] = r.Reduction
	}
	if r.Root >= 0 {
		list[3] = fmt.Sprint("root ", r.Root)
	}
	if inPlace {
		list[5] = "in place"
	}
	return list
}

// curves returns a curve for each side of each operation. It omits values that are not
// positive or not finite, which a logarithmic axis cannot show.
func (r *Report) curves(of func(*Measure) float64) (list []*curve) {
	for _, row := range r.Rows {
		for side, m := range row.Sides() {
			y := of(m)
			if !(y > 0) || math.IsInf(y, 1) {
				continue
			}
			features := row.features(side == 1)
			i := slices.IndexFunc(list, func(c *curve) bool { return slices.Equal(c.features, features) })
			if i < 0 {
				i = len(list)
				list = append(list, &curve{features: features})
			}
			list[i].points = append(list[i].points, chart.Point{X: float64(row.Bytes), Y: y})
		}
	}
	return list
}

// split returns the features that all curves share, and for each curve the others.
func split(list []*curve) (shared string, names []string) {
	same := func(f int) bool {
		return !slices.ContainsFunc(list, func(c *curve) bool { return c.features[f] != list[0].features[f] })
	}
	join := func(c *curve, want func(f int) bool) string {
		var parts []string
		for f, text := range c.features {
			if text != "" && want(f) {
				parts = append(parts, text)
			}
		}
		return strings.Join(parts, ", ")
	}
	for _, c := range list {
		names = append(names, join(c, func(f int) bool { return !same(f) }))
	}
	return join(list[0], same), names
}

// chart returns a chart of one quantity, or nil if there are no values.
func (r *Report) chart(title, unit string, of func(*Measure) float64) *chart.Chart {
	list := r.curves(of)
	if len(list) == 0 {
		return nil
	}
	shared, names := split(list)
	if shared != "" {
		title += ": " + shared
	}
	c := &chart.Chart{Title: title}
	low, high := chart.Point{X: math.Inf(1), Y: math.Inf(1)}, chart.Point{}
	for i, l := range list {
		prefix := names[i]
		if prefix != "" {
			prefix += ", "
		}
		for j, q := range l.points {
			l.points[j].Text = fmt.Sprintf("%s%s: %s %s", prefix, bytesText(q.X), plain(q.Y), unit)
			low.X, low.Y = min(low.X, q.X), min(low.Y, q.Y)
			high.X, high.Y = max(high.X, q.X), max(high.Y, q.Y)
		}
		c.Series = append(c.Series, chart.Series{Name: names[i], Points: l.points})
	}
	c.X = chart.Powers("size", low.X, high.X, bytesText)
	c.Y = chart.Decades(unit, low.Y, high.Y, plain)
	return c
}

// bytesText formats bytes in the largest fitting unit.
func bytesText(n float64) string {
	for _, u := range []struct {
		name string
		of   float64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.of {
			return plain(n/u.of) + " " + u.name
		}
	}
	return plain(n) + " B"
}
