package chart

import (
	"fmt"
	"html"
	"image/color"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

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

// element returns the drawing as an svg element. gonum draws text and axes in black. The
// element uses the color of the page's text instead, which follows the mode.
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
