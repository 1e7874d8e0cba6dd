package perf

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
)

//go:embed report.html
var page string

// WriteHTML writes a self-contained page with plots and all figures.
func (r *Report) WriteHTML(w io.Writer) error {
	t, err := template.New("report").Funcs(template.FuncMap{"short": short, "bytes": bytesText}).Parse(page)
	if err != nil {
		return err
	}
	return t.Execute(w, struct {
		*Report
		Title string
		Plots []plot
	}{r, r.title(), r.plots()})
}

// A plot shows curves over the size with two logarithmic axes.
type plot struct {
	Title  string
	Unit   string
	Curves []curve
	XTicks []tick
	YTicks []tick
}

type curve struct {
	Name   string
	Color  string
	Points string // of an SVG polyline
	Marks  []mark
}

type mark struct {
	X, Y float64
	Text string
}

type tick struct {
	At   float64
	Text string
}

// The area inside the axes, in pixels.
const (
	plotLeft, plotTop     = 64, 16
	plotWidth, plotHeight = 720, 300
)

var colors = []string{"#1b6ca8", "#d1495b", "#3d8b51", "#8d6a9f", "#c98a1b", "#4a4a48", "#2a9d9d", "#b0578d", "#7a8b1e", "#6b7a8f", "#a0522d"}

// plots returns plots of the bandwidths and times of all operations.
func (r *Report) plots() []plot {
	if len(r.Rows) == 0 {
		return nil
	}
	return []plot{
		r.plot("Bus bandwidth", "GB/s", func(m *Measure) float64 { return m.BusBW }),
		r.plot("Time of an operation", "us", func(m *Measure) float64 { return m.Time }),
		r.plot("99th percentile of single operations", "us", func(m *Measure) float64 { return m.P99 }),
	}
}

// series are the points of curves by name.
type series struct {
	names  []string // in the order of the report
	points map[string][]point
	xs, ys axis // contain all points
}

type point struct{ x, y float64 }

// series returns a curve for each side of each operation. It omits values that are not
// positive, which a logarithmic axis cannot show.
func (r *Report) series(of func(*Measure) float64) *series {
	empty := axis{math.Inf(1), math.Inf(-1)}
	s := &series{points: map[string][]point{}, xs: empty, ys: empty}
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			y := of(m)
			if !(y > 0) {
				continue
			}
			name, _, _ := strings.Cut(row.name(i == 1), "/bytes=")
			if !slices.Contains(s.names, name) {
				s.names = append(s.names, name)
			}
			s.points[name] = append(s.points[name], point{float64(row.Bytes), y})
			s.xs.include(float64(row.Bytes))
			s.ys.include(y)
		}
	}
	return s
}

func (r *Report) plot(title, unit string, of func(*Measure) float64) plot {
	p := plot{Title: title, Unit: unit}
	s := r.series(of)
	if len(s.names) == 0 {
		return p
	}
	xs, ys := s.xs, s.ys
	p.XTicks, p.YTicks = xs.ticks(2, bytesText), ys.ticks(10, plain)
	for i := range p.XTicks {
		p.XTicks[i].At = plotLeft + p.XTicks[i].At*plotWidth
	}
	for i := range p.YTicks {
		p.YTicks[i].At = plotTop + (1-p.YTicks[i].At)*plotHeight
	}
	for i, name := range s.names {
		c := curve{Name: name, Color: colors[i%len(colors)]}
		var points []string
		for _, q := range s.points[name] {
			x, y := plotLeft+xs.at(q.x)*plotWidth, plotTop+(1-ys.at(q.y))*plotHeight
			points = append(points, fmt.Sprintf("%.1f,%.1f", x, y))
			c.Marks = append(c.Marks, mark{x, y, fmt.Sprintf("%s, %s: %s %s", name, bytesText(q.x), plain(q.y), unit)})
		}
		c.Points = strings.Join(points, " ")
		p.Curves = append(p.Curves, c)
	}
	return p
}

// An axis is logarithmic.
type axis struct{ low, high float64 }

func (a *axis) include(x float64) { a.low, a.high = min(a.low, x), max(a.high, x) }

// at returns the position of a value, from 0 to 1.
func (a *axis) at(x float64) float64 {
	if a.high == a.low {
		return 0.5
	}
	return math.Log(x/a.low) / math.Log(a.high/a.low)
}

// mostTicks limits the ticks of an axis.
const mostTicks = 12

// ticks returns ticks at powers of base.
func (a *axis) ticks(base float64, text func(float64) string) (list []tick) {
	first, last := math.Ceil(math.Log(a.low)/math.Log(base)-1e-9), math.Floor(math.Log(a.high)/math.Log(base)+1e-9)
	every := max(math.Ceil((last-first+1)/mostTicks), 1)
	for e := first; e <= last; e += every {
		x := math.Pow(base, e)
		list = append(list, tick{a.at(x), text(x)})
	}
	if len(list) == 0 {
		return []tick{{a.at(a.low), text(a.low)}}
	}
	return list
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
