package results

import (
	"fmt"
	"html"
	"io"
	"strconv"
)

// A Plot is a plot of quantities in bytes.
type Plot struct {
	Title  string
	Note   string // below the plot
	XLabel string
	Step   int    // number of events of a value; 0 means 1
	Areas  []Area // the first is behind the others
	Lines  []Line
}

// An Area is filled from 0 up to its values; each value holds until the next.
type Area struct {
	Name   string
	Values []int64
}

// A Line is a dashed horizontal line.
type Line struct {
	Name  string
	Value int64
}

const (
	memoryTicks = 8   // of an axis
	mostSteps   = 660 // of an area, about one for each pixel
)

// WriteSVG writes the plot as SVG.
func (p *Plot) WriteSVG(w io.Writer) error { return p.chart().WriteSVG(w) }

// WriteHTML writes an HTML page with the plot.
func (p *Plot) WriteHTML(w io.Writer) error {
	_, err := fmt.Fprintf(w, "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>%s</title>\n<style>%sbody{margin:24px;overflow-x:auto}</style></head>\n<body>\n%s</body>\n</html>\n",
		html.EscapeString(p.Title), Style, p.chart().SVG())
	return err
}

// A scale maps the data to the axes.
type scale struct {
	values int   // of the longest area
	events int   // of each value
	most   int64 // value at the upper edge
	step   int64 // between two ticks
}

func (p *Plot) scale() scale {
	s := scale{values: 1, events: max(p.Step, 1)}
	top := int64(1)
	for _, a := range p.Areas {
		s.values = max(s.values, len(a.Values))
		top = max(top, most(a.Values))
	}
	for _, l := range p.Lines {
		top = max(top, l.Value)
	}
	s.step = 1
	for top/s.step >= memoryTicks {
		s.step *= 2
	}
	s.most = (top/s.step + 1) * s.step
	return s
}

// chart returns the chart, whose legend shows the largest value of each area
// and line.
func (p *Plot) chart() *Chart {
	s := p.scale()
	events := s.values * s.events
	c := &Chart{
		Title: p.Title, Note: p.Note,
		X: Linear(p.XLabel, float64(events), float64(decimalStep(events)), func(v float64) string { return strconv.Itoa(int(v)) }),
		Y: Linear("memory in bytes", float64(s.most), float64(s.step), func(v float64) string { return Bytes(int64(v)) }),
	}
	for _, a := range p.Areas {
		c.Series = append(c.Series, Series{Name: a.Name + ", at most " + Bytes(most(a.Values)), Points: s.outline(a.Values), Filled: true})
	}
	for _, l := range p.Lines {
		y := float64(l.Value)
		c.Series = append(c.Series, Series{Name: l.Name + " " + Bytes(l.Value), Points: []Point{{Y: y}, {X: float64(events), Y: y}}, Dashed: true})
	}
	return c
}

func most(values []int64) (most int64) {
	for _, v := range values {
		most = max(most, v)
	}
	return most
}

// decimalStep returns 1, 2 or 5 times a power of ten.
func decimalStep(n int) int {
	for power := 1; ; power *= 10 {
		for _, m := range []int{1, 2, 5} {
			if n/(m*power) <= memoryTicks {
				return m * power
			}
		}
	}
}

// outline returns the steps of an area's upper edge. If several values share a pixel, it
// uses the largest one, because the peak of the memory matters.
func (s scale) outline(values []int64) (points []Point) {
	group := (len(values) + mostSteps - 1) / mostSteps
	last := int64(0)
	to := func(i int, v int64) {
		x := float64(i * s.events)
		points = append(points, Point{X: x, Y: float64(last)}, Point{X: x, Y: float64(v)})
		last = v
	}
	to(0, 0)
	for i := 0; i < len(values); i += group {
		if v := most(values[i:min(i+group, len(values))]); v != last {
			to(i, v)
		}
	}
	to(len(values), 0)
	return points
}

// Bytes formats a number of bytes in its largest unit, such as "1.5 GiB".
func Bytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	x, i := float64(n), 0
	for x >= 1024 && i < len(units)-1 {
		x /= 1024
		i++
	}
	return strconv.FormatFloat(float64(int64(x*100+0.5))/100, 'f', -1, 64) + " " + units[i]
}
