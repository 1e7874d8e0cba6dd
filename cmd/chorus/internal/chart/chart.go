package chart

import (
	"fmt"
	"image/color"
	"io"
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
