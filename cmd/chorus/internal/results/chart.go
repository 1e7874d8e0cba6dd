package results

import (
	"fmt"
	"html"
	"image/color"
	"io"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A Chart has two axes and shows several series.
type Chart struct {
	Title  string
	Note   string // below the axes
	X, Y   Axis
	Series []Series // the first is behind the others
}

// A Series is a line through points, with a name in the legend.
type Series struct {
	Name   string
	Points []Point
	Filled bool // fills the area below the line
	Dashed bool
}

// A Point is one value. If Text is not empty, the chart marks the point and shows the text
// while the pointer is over the mark.
type Point struct {
	X, Y float64
	Text string
}

// Dimensions in pixels. A chart becomes wider and higher if its legend needs the place.
const (
	plotWidth, plotHeight = 660, 360
	margin, gap           = 12, 18
	// fallback is the width of texts in fonts that a browser uses if it has neither Liberation
	// nor Arial, relative to the widths that gonum knows. DejaVu is the widest common one.
	fallback            = 1.25
	textSize, titleSize = 12, 15
)

// grid is a color without contrast to the background.
var grid = color.NRGBA{A: 0x26}

// SVG returns an svg element for an HTML page with Style.
func (c *Chart) SVG() string {
	p, keys := plot.New(), plot.NewLegend()
	c.style(p, &keys)
	marks := &marks{}
	for i, s := range c.Series {
		l := s.line(i)
		p.Add(l)
		if s.Name != "" {
			keys.Add(s.Name, l)
		}
		marks.series = append(marks.series, s)
	}
	p.Add(marks)
	c.X.apply(&p.X)
	c.Y.apply(&p.Y)

	size := keys.Rectangle(draw.Canvas{}).Size()
	if len(c.Series) == 0 || size.Y == 0 {
		size = vg.Point{}
	}
	size.X *= fallback
	width := plotWidth + size.X + 2*margin
	// gonum places the first entry a descent lower than Rectangle says.
	height := max(plotHeight, size.Y+2*textSize) + 2*margin
	canvas := vgsvg.New(width, height)
	inner := draw.Crop(draw.New(canvas), margin, -margin, margin, -margin)
	keys.Draw(draw.Crop(inner, plotWidth+gap/2, 0, 0, 0))
	body := draw.Crop(inner, 0, -(size.X + gap/2), 0, 0)
	if c.Note != "" {
		style := p.X.Tick.Label
		style.XAlign, style.YAlign = draw.XLeft, draw.YBottom
		note := fit(style, c.Note, body.Max.X-body.Min.X)
		body.FillText(style, body.Min, note)
		body.Min.Y += style.Height(note) + gap/2
	}
	p.Title.Text = fit(p.Title.TextStyle, c.Title, body.Max.X-body.Min.X)
	p.Draw(body)
	return c.element(canvas, marks.list)
}

// WriteSVG writes an SVG file.
func (c *Chart) WriteSVG(w io.Writer) error {
	tag, rest, _ := strings.Cut(c.SVG(), "\n")
	_, err := fmt.Fprintf(w, "%s xmlns=\"http://www.w3.org/2000/svg\">\n<style>\n%s</style>\n%s", strings.TrimSuffix(tag, ">"), Style, rest)
	return err
}

// style sets fonts and distances.
func (c *Chart) style(p *plot.Plot, keys *plot.Legend) {
	p.BackgroundColor = nil
	for _, s := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &keys.TextStyle} {
		s.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: textSize}
	}
	p.Title.TextStyle.Font.Size = titleSize
	p.Title.Padding, p.X.Padding, p.Y.Padding = gap/2, 0, 0
	p.X.Label.Padding, p.Y.Label.Padding = gap/3, gap/3
	keys.Left, keys.Top, keys.Padding = true, true, gap/3
	lines := plotter.NewGrid()
	lines.Vertical.Color, lines.Horizontal.Color = grid, grid
	p.Add(lines)
}

// line returns the line of series i.
func (s *Series) line(i int) *plotter.Line {
	xys := make(plotter.XYs, len(s.Points))
	for j, q := range s.Points {
		xys[j] = plotter.XY{X: q.X, Y: q.Y}
	}
	c := Colors[i%len(Colors)]
	l := &plotter.Line{XYs: xys, LineStyle: draw.LineStyle{Color: c, Width: 2}}
	switch {
	case s.Dashed:
		l.Dashes = []vg.Length{6, 4}
	case i >= len(Colors): // tells it from the line of the same color
		l.Dashes = []vg.Length{2, 2}
	}
	if s.Filled {
		c.A = 0x66
		l.Width, l.FillColor = 1, c
	}
	return l
}

// fit breaks a text into lines of at most the given width, and shortens longer words.
func fit(style text.Style, s string, width vg.Length) string {
	var lines []string
	width /= fallback
	for _, word := range strings.Fields(s) {
		word = shorten(style, word, width)
		last := len(lines) - 1
		if last >= 0 && style.Width(lines[last]+" "+word) <= width {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return strings.Join(lines, "\n")
}

func shorten(style text.Style, word string, width vg.Length) string {
	if style.Width(word) <= width {
		return word
	}
	runes := []rune(word)
	for len(runes) > 0 && style.Width(string(runes)+"…") > width {
		runes = runes[:len(runes)-1]
	}
	return string(runes) + "…"
}

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

// Colors are the colors of the series. Each has a contrast of at least 3 to Light and to Dark.
var Colors = []color.NRGBA{
	{0x2f, 0x74, 0xc8, 0xff}, {0xd0, 0x4a, 0x4a, 0xff}, {0x2f, 0x8f, 0x5b, 0xff}, {0x98, 0x68, 0xbe, 0xff},
	{0xb9, 0x6f, 0x12, 0xff}, {0x7c, 0x7c, 0x78, 0xff}, {0x1f, 0x8c, 0x8c, 0xff}, {0xc2, 0x52, 0x9a, 0xff},
	{0x79, 0x83, 0x1c, 0xff}, {0x66, 0x7f, 0xa8, 0xff}, {0xa8, 0x5f, 0x38, 0xff},
}

// Light and Dark are the colors of the background in the two modes.
var Light, Dark = color.NRGBA{0xff, 0xff, 0xff, 0xff}, color.NRGBA{0x16, 0x16, 0x16, 0xff}

// Style is CSS for a page or a file with charts.
var Style = fmt.Sprintf(`:root{color-scheme:light dark;color:#1a1a19;background:%[1]s}
.chart{color:#1a1a19;background:%[1]s;max-width:100%%;height:auto}
.chart text{fill:currentColor;font-family:"Liberation Sans",Arial,Helvetica,sans-serif!important}
@media(max-width:40rem){.chart{max-width:none}} /* a phone scrolls, so that the text stays readable */
@media(prefers-color-scheme:dark){:root,.chart{color:#e8e6e1;background:%[2]s}}
`, hex(Light), hex(Dark))

func hex(c color.NRGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

// element returns the drawing as an svg element. gonum draws text and axes in
// black, which the element replaces by the color of the page's text, so that
// they follow the mode.
func (c *Chart) element(canvas *vgsvg.Canvas, list []mark) string {
	var drawing, b strings.Builder
	_, _ = canvas.WriteTo(&drawing) // a strings.Builder does not fail
	body := drawing.String()
	body = body[strings.Index(body, "<g "):strings.LastIndex(body, "</svg>")]
	w, h := canvas.Size()
	fmt.Fprintf(&b, `<svg class="chart" role="img" aria-label="%s" width="%.0f" height="%.0f" viewBox="0 0 %[2]g %[3]g">`+"\n",
		html.EscapeString(c.Title), float64(w), float64(h))
	b.WriteString(strings.ReplaceAll(body, "stroke:#000000", "stroke:currentColor"))
	for _, m := range list {
		fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s</title></circle>`+"\n",
			float64(m.at.X), float64(h-m.at.Y), hex(m.color), html.EscapeString(m.text))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// marks is a plot.Plotter that collects the positions of points with a text. A canvas of
// gonum cannot draw a mark that shows a text.
type marks struct {
	series []Series
	list   []mark
}

type mark struct {
	at    vg.Point
	color color.NRGBA
	text  string
}

// Plot collects the positions on the canvas.
func (m *marks) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, s := range m.series {
		for _, q := range s.Points {
			if q.Text != "" {
				m.list = append(m.list, mark{vg.Point{X: x(q.X), Y: y(q.Y)}, Colors[i%len(Colors)], q.Text})
			}
		}
	}
}
