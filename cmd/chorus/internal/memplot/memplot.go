// Package memplot draws memory over time as a self-contained SVG or HTML file.
package memplot

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"strconv"
	"strings"
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
	Color  string
	Values []int64
}

// A Line is a dashed horizontal line.
type Line struct {
	Name  string
	Color string
	Value int64
}

// Dimensions in pixels, and styles.
const (
	width, height             = 960, 480
	left, right, top, bottom  = 84, 24, 76, 72
	plotWidth, plotHeight     = width - left - right, height - top - bottom
	mostTicks                 = 8
	axisColor, gridColor      = "#52514e", "#e4e3df"
	textColor, backgroundFill = "#0b0b0b", "#ffffff"
	dashes                    = `stroke-width="1.5" stroke-dasharray="6 4"`
)

// WriteSVG writes the plot as SVG.
func (p *Plot) WriteSVG(w io.Writer) error {
	b := bufio.NewWriter(w)
	p.draw(b)
	return b.Flush()
}

// WriteHTML writes an HTML page with the plot.
func (p *Plot) WriteHTML(w io.Writer) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>%s</title>\n", html.EscapeString(p.Title))
	fmt.Fprintf(b, "<style>body{margin:24px;background:%s}svg{max-width:100%%;height:auto}</style></head>\n<body>\n", backgroundFill)
	p.draw(b)
	fmt.Fprint(b, "</body>\n</html>\n")
	return b.Flush()
}

// A scale maps the data to pixels.
type scale struct {
	values int   // of the longest area
	events int   // of each value
	most   int64 // value at the upper edge
	step   int64 // between two ticks
}

func (p *Plot) scale() scale {
	s := scale{values: 1, events: max(p.Step, 1)}
	most := int64(1)
	for _, a := range p.Areas {
		s.values = max(s.values, len(a.Values))
		for _, v := range a.Values {
			most = max(most, v)
		}
	}
	for _, l := range p.Lines {
		most = max(most, l.Value)
	}
	s.step = 1
	for most/s.step >= mostTicks {
		s.step *= 2
	}
	s.most = (most/s.step + 1) * s.step
	return s
}

func (s scale) x(value float64) float64 { return left + plotWidth*value/float64(s.values) }
func (s scale) y(v int64) float64       { return top + plotHeight*(1-float64(v)/float64(s.most)) }

func (p *Plot) draw(w io.Writer) {
	s := p.scale()
	fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img" font-family="system-ui, sans-serif" font-size="12" fill="%[3]s">`+"\n",
		width, height, textColor)
	fmt.Fprintf(w, "<title>%s</title>\n<rect width=\"%d\" height=\"%d\" fill=\"%s\"/>\n", html.EscapeString(p.Title), width, height, backgroundFill)
	text(w, left, 24, `font-size="15" font-weight="600"`, p.Title)
	p.legend(w)
	s.grid(w)
	for _, a := range p.Areas {
		fmt.Fprintf(w, "<path d=\"%s\" fill=\"%s\"/>\n", s.outline(a.Values), a.Color)
	}
	for _, l := range p.Lines {
		line(w, left, s.y(l.Value), width-right, s.y(l.Value), l.Color, dashes)
	}
	s.axes(w, p.XLabel)
	text(w, left, height-12, fmt.Sprintf("fill=%q", axisColor), p.Note)
	fmt.Fprint(w, "</svg>\n")
}

func line(w io.Writer, x1, y1, x2, y2 float64, color, attributes string) {
	fmt.Fprintf(w, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=%q %s/>\n", x1, y1, x2, y2, color, attributes)
}

func text(w io.Writer, x, y float64, attributes, s string) {
	fmt.Fprintf(w, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, attributes, html.EscapeString(s))
}

// legend shows the name and the largest value of each area and line.
func (p *Plot) legend(w io.Writer) {
	x := float64(left)
	entry := func(mark, name string) {
		fmt.Fprintf(w, "<g transform=\"translate(%.1f 46)\">%s</g>\n", x, mark)
		text(w, x+26, 50, "", name)
		x += 26 + 6.4*float64(len(name)) + 18
	}
	for _, a := range p.Areas {
		most := int64(0)
		for _, v := range a.Values {
			most = max(most, v)
		}
		entry(fmt.Sprintf(`<rect y="-5" width="20" height="10" fill="%s"/>`, a.Color), a.Name+", at most "+Bytes(most))
	}
	for _, l := range p.Lines {
		entry(fmt.Sprintf(`<line x2="20" stroke="%s" %s/>`, l.Color, dashes), l.Name+" "+Bytes(l.Value))
	}
}

func (s scale) grid(w io.Writer) {
	for v := s.step; v <= s.most; v += s.step {
		line(w, left, s.y(v), width-right, s.y(v), gridColor, "")
	}
}

// axes draws the axes with ticks, values and titles.
func (s scale) axes(w io.Writer, xLabel string) {
	const base = height - bottom
	fmt.Fprintf(w, "<path d=\"M%d %dV%dH%d\" fill=\"none\" stroke=\"%s\"/>\n", left, top, base, width-right, axisColor)
	for v := int64(0); v <= s.most; v += s.step {
		line(w, left-5, s.y(v), left, s.y(v), axisColor, "")
		text(w, left-9, s.y(v)+4, `text-anchor="end"`, Bytes(v))
	}
	events := s.values * s.events
	step := decimalStep(events)
	for e := 0; e <= events; e += step {
		x := s.x(float64(e) / float64(s.events))
		line(w, x, base, x, base+5, axisColor, "")
		text(w, x, base+19, `text-anchor="middle"`, strconv.Itoa(e))
	}
	text(w, left+plotWidth/2, base+38, `text-anchor="middle"`, xLabel)
	fmt.Fprintf(w, "<text transform=\"translate(18 %d) rotate(-90)\" text-anchor=\"middle\">memory in bytes</text>\n", top+plotHeight/2)
}

// decimalStep returns 1, 2 or 5 times a power of ten.
func decimalStep(n int) int {
	for power := 1; ; power *= 10 {
		for _, m := range []int{1, 2, 5} {
			if n/(m*power) <= mostTicks {
				return m * power
			}
		}
	}
}

// outline returns the path around an area. If several values share a pixel, it
// uses the largest one, because the peak of the memory matters.
func (s scale) outline(values []int64) string {
	var d strings.Builder
	fmt.Fprintf(&d, "M%d %d", left, height-bottom)
	group := (len(values) + plotWidth - 1) / plotWidth
	last := int64(0)
	for i := 0; i < len(values); i += group {
		most := int64(0)
		for _, v := range values[i:min(i+group, len(values))] {
			most = max(most, v)
		}
		if most != last {
			fmt.Fprintf(&d, "H%.1fV%.1f", s.x(float64(i)), s.y(most))
			last = most
		}
	}
	fmt.Fprintf(&d, "H%.1fV%dZ", s.x(float64(len(values))), height-bottom)
	return d.String()
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
