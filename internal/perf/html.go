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

// WriteHTML writes a page with plots and all figures, which needs nothing but itself.
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

// A plot is a picture of curves over the size, both axes logarithmic.
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

// The inside of a picture, in pixels; the page draws around it.
const (
	plotLeft, plotTop     = 64, 16
	plotWidth, plotHeight = 720, 300
)

var colors = []string{"#1b6ca8", "#d1495b", "#3d8b51", "#8d6a9f", "#c98a1b", "#4a4a48", "#2a9d9d", "#b0578d", "#7a8b1e", "#6b7a8f", "#a0522d"}

// plots are the bandwidths and the times of all operations.
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

func (r *Report) plot(title, unit string, of func(*Measure) float64) plot {
	type point struct{ x, y float64 }
	series := map[string][]point{}
	var names []string
	xs, ys := axis{math.Inf(1), math.Inf(-1)}, axis{math.Inf(1), math.Inf(-1)}
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			y := of(m)
			if !(y > 0) {
				continue
			}
			name, _, _ := strings.Cut(row.name(i == 1), "/bytes=")
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
			series[name] = append(series[name], point{float64(row.Bytes), y})
			xs.hold(float64(row.Bytes))
			ys.hold(y)
		}
	}
	p := plot{Title: title, Unit: unit}
	if len(names) == 0 {
		return p
	}
	p.XTicks, p.YTicks = xs.ticks(2, bytesText), ys.ticks(10, plain)
	for i := range p.XTicks {
		p.XTicks[i].At = plotLeft + p.XTicks[i].At*plotWidth
	}
	for i := range p.YTicks {
		p.YTicks[i].At = plotTop + (1-p.YTicks[i].At)*plotHeight
	}
	for i, name := range names {
		c := curve{Name: name, Color: colors[i%len(colors)]}
		var points []string
		for _, q := range series[name] {
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

func (a *axis) hold(x float64) { a.low, a.high = min(a.low, x), max(a.high, x) }

// at is where a value lies, from 0 to 1.
func (a *axis) at(x float64) float64 {
	if a.high == a.low {
		return 0.5
	}
	return math.Log(x/a.low) / math.Log(a.high/a.low)
}

// mostTicks bounds the ticks of an axis.
const mostTicks = 12

// ticks are at powers of base.
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

// bytesText writes bytes with the largest unit that fits.
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
