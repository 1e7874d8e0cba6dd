package results

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/gochorus/chorus/perf"
)

// pageStyle is the style of the page without its charts.
const pageStyle = `body { margin: 24px; max-width: 1100px; font: 14px/1.4 sans-serif }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #e4e3df }
.bad { color: #b00020; font-weight: bold }
.good { color: #23703a }
.wide { overflow-x: auto } /* on a phone: charts and tables keep their size */
.wide td:first-child, .wide th:first-child { position: sticky; left: 0; background: Canvas }
@media (max-width: 40rem) { body { margin: 10px } }
@media (prefers-color-scheme: dark) {
  th, td { border-color: #3a3a38 }
  .bad { color: #ff8a80 }
  .good { color: #7fd49a }
}
`

// WriteHTML writes a self-contained page with charts and all figures.
func WriteHTML(r *perf.Report, w io.Writer) error {
	p := &htmlPage{}
	p.add("<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>chorus perf: %s</title>\n", title(r))
	p.WriteString("<style>\n" + Style + pageStyle + "</style></head>\n<body>\n<h1>chorus perf</h1>\n")
	p.add("<p>%s, %s</p>\n", title(r), r.Time.Format("2006-01-02 15:04 MST"))
	p.verdict(r.Verdict)
	if r.Error != "" {
		p.add("<p><strong>The measurement ended early: %s</strong></p>\n", r.Error)
	}
	for _, c := range charts(r) {
		p.WriteString("<div class=\"wide\">" + c.SVG() + "</div>\n")
	}
	if r.Pairs != nil {
		p.pairs(r.Pairs)
	}
	if len(r.Rows) > 0 {
		p.figures(r)
	}
	p.WriteString("</body></html>\n")
	_, err := io.WriteString(w, p.String())
	return err
}

// An htmlPage collects the text of a page. Packages for templates call methods by name, so the linker
// would keep all exported methods of the command.
type htmlPage struct{ strings.Builder }

// add writes a format whose arguments are plain text or numbers.
func (p *htmlPage) add(format string, args ...any) {
	for i, a := range args {
		if text, ok := a.(string); ok {
			args[i] = html.EscapeString(text)
		}
	}
	fmt.Fprintf(p, format, args...)
}

// cells writes a row of a table, with cells of the tag td or th.
func (p *htmlPage) cells(tag string, texts ...string) {
	p.WriteString("<tr>")
	for _, text := range texts {
		p.add("<"+tag+">%s</"+tag+">", text)
	}
	p.WriteString("</tr>\n")
}

func (p *htmlPage) verdict(v *perf.Verdict) {
	switch {
	case v == nil:
	case v.OK:
		p.add("<p class=\"good\">Good: %s.</p>\n", v.Reason)
	default:
		p.add("<p class=\"bad\">Not good: %s.</p>\n", v.Reason)
	}
}

func (p *htmlPage) pairs(of *perf.Pairs) {
	p.add("<h2>Pairs: GB/s from row to column, %d bytes one way</h2>\n", of.Bytes)
	p.matrix("%.1f", of.Bandwidth)
	p.WriteString("<h2>Pairs: half a round trip of 8 bytes, us</h2>\n")
	p.matrix("%.2f", of.Latency)
}

// matrix writes a table with a row and a column for each rank.
func (p *htmlPage) matrix(format string, values [][]float64) {
	p.WriteString("<div class=\"wide\"><table><tr><th></th>")
	for i := range values {
		p.add("<th>%d</th>", i)
	}
	p.WriteString("</tr>\n")
	for i, row := range values {
		p.add("<tr><th>%d</th>", i)
		for j, x := range row {
			if i == j {
				p.WriteString("<td>–</td>")
			} else {
				p.add("<td>"+format+"</td>", x)
			}
		}
		p.WriteString("</tr>\n")
	}
	p.WriteString("</table></div>\n")
}

func (p *htmlPage) figures(r *perf.Report) {
	p.add("<h2>Figures</h2>\n<p>Average bus bandwidth %.5g GB/s over all rows", r.AvgBusBW)
	if r.Link > 0 {
		p.add("; a link does %v GB/s in one direction", r.Link)
	}
	if r.Wrong > 0 {
		p.add("; wrong elements: <span class=\"bad\">%d</span>.</p>\n", r.Wrong)
	} else {
		p.WriteString("; wrong elements: 0.</p>\n")
	}
	p.WriteString("<div class=\"wide\"><table>\n")
	p.cells("th", "operation", "size", "type", "redop", "root", "place", "time (us)", "algbw", "busbw", "p50 (us)", "p99 (us)", "wrong")
	for _, row := range r.Rows {
		for side, m := range row.Sides() {
			p.figure(row, m, side == 1)
		}
	}
	p.WriteString("</table></div>\n")
}

// figure writes the row of the table for one side of a row.
func (p *htmlPage) figure(row *perf.Row, m *perf.Measure, inPlace bool) {
	root, place, wrong := "", "out", "not checked"
	if row.Root >= 0 {
		root = fmt.Sprint(row.Root)
	}
	if inPlace {
		place = "in"
	}
	if m.Wrong != nil {
		wrong = fmt.Sprint(*m.Wrong)
	}
	p.cells("td", row.Operation, fmt.Sprint(row.Bytes), row.Type, row.Reduction, root, place,
		short(m.Time), fmt.Sprintf("%.2f", m.AlgBW), fmt.Sprintf("%.2f", m.BusBW), short(m.P50), short(m.P99), wrong)
}

// charts returns charts of the bandwidths and times of all operations.
func charts(r *perf.Report) (list []*Chart) {
	for _, c := range []*Chart{
		chartOf(r, "Bus bandwidth", "GB/s", func(m *perf.Measure) float64 { return m.BusBW }),
		chartOf(r, "Time of an operation", "us", func(m *perf.Measure) float64 { return m.Time }),
		chartOf(r, "99th percentile of single operations", "us", func(m *perf.Measure) float64 { return m.P99 }),
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
	points   []Point
}

// features describes a side of a row in words, without its size.
func features(r *perf.Row, inPlace bool) []string {
	list := []string{strings.ReplaceAll(r.Operation, "_", "-"), r.Type, "", "", r.Strategy, "out of place"}
	if r.Reduction != "none" {
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
func curves(r *perf.Report, of func(*perf.Measure) float64) (list []*curve) {
	for _, row := range r.Rows {
		for side, m := range row.Sides() {
			y := of(m)
			if !(y > 0) || math.IsInf(y, 1) {
				continue
			}
			f := features(row, side == 1)
			i := slices.IndexFunc(list, func(c *curve) bool { return slices.Equal(c.features, f) })
			if i < 0 {
				i = len(list)
				list = append(list, &curve{features: f})
			}
			list[i].points = append(list[i].points, Point{X: float64(row.Bytes), Y: y})
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
func chartOf(r *perf.Report, title, unit string, of func(*perf.Measure) float64) *Chart {
	list := curves(r, of)
	if len(list) == 0 {
		return nil
	}
	shared, names := split(list)
	if shared != "" {
		title += ": " + shared
	}
	c := &Chart{Title: title}
	low, high := Point{X: math.Inf(1), Y: math.Inf(1)}, Point{}
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
		c.Series = append(c.Series, Series{Name: names[i], Points: l.points})
	}
	c.X = Powers("size", low.X, high.X, bytesText)
	c.Y = Decades(unit, low.Y, high.Y, plain)
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
