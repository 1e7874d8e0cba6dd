package results

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
)

// A box is the extent of a text in the units of the view box.
type box struct {
	text                     string
	left, right, top, bottom float64
}

// boxes computes the extents of all texts of a picture, and returns the size of its view
// box. It applies the transformations of the SVG, and measures texts with the font's widths.
func boxes(t *testing.T, svg string) (list []box, width, height float64) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	stack, size := []affine{{a: 1, d: 1}}, 0.0
	var now affine
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return list, width, height
		}
		require.NoError(t, err)
		switch tok := tok.(type) {
		case xml.StartElement:
			now = stack[len(stack)-1]
			size = 0
			attrs := map[string]string{}
			for _, a := range tok.Attr {
				require.NotRegexp(t, `NaN|Inf|%!`, a.Value)
				attrs[a.Name.Local] = a.Value
			}
			now = now.then(t, attrs["transform"])
			switch tok.Name.Local {
			case "svg":
				size := strings.Fields(attrs["viewBox"])
				width, height = parse(t, size[2]), parse(t, size[3])
			case "text":
				now = now.then(t, "translate("+attrs["x"]+","+attrs["y"]+")")
				size = parse(t, regexp.MustCompile(`font-size:([\d.]+)px`).FindStringSubmatch(attrs["style"])[1])
			}
			stack = append(stack, now)
		case xml.EndElement:
			stack, size = stack[:len(stack)-1], 0
		case xml.CharData:
			if size > 0 {
				list = append(list, now.box(string(tok), size))
			}
		}
	}
}

func parse(t *testing.T, s string) float64 {
	v, err := strconv.ParseFloat(s, 64)
	require.NoError(t, err)
	return v
}

// affine maps (x, y) to (a x + c y + e, b x + d y + f).
type affine struct{ a, b, c, d, e, f float64 }

func (m affine) at(x, y float64) (float64, float64) { return m.a*x + m.c*y + m.e, m.b*x + m.d*y + m.f }

// then applies a list of SVG transformations before m.
func (m affine) then(t *testing.T, list string) affine {
	for _, s := range regexp.MustCompile(`(\w+)\(([^)]*)\)`).FindAllStringSubmatch(list, -1) {
		var v []float64
		for _, f := range strings.FieldsFunc(s[2], func(r rune) bool { return r == ',' || r == ' ' }) {
			v = append(v, parse(t, f))
		}
		switch s[1] {
		case "translate":
			m.e, m.f = m.at(v[0], v[1])
		case "scale":
			m.a, m.b, m.c, m.d = m.a*v[0], m.b*v[0], m.c*v[1], m.d*v[1]
		case "rotate":
			sin, cos := math.Sincos(v[0] * math.Pi / 180)
			m.a, m.b, m.c, m.d = m.a*cos+m.c*sin, m.b*cos+m.d*sin, m.c*cos-m.a*sin, m.d*cos-m.b*sin
		default:
			require.Fail(t, "unknown transformation "+s[1])
		}
	}
	return m
}

// box returns the extent of a text from its base line up to the height of its font. A
// browser may have to use a font that is wider by a fifth.
func (m affine) box(s string, size float64) box {
	face := font.DefaultCache.Lookup(font.Font{Typeface: "Liberation", Variant: "Sans"}, vg.Length(size))
	b := box{s, math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)}
	for _, x := range []float64{0, 1.2 * float64(face.Width(s))} {
		for _, y := range []float64{0, -0.7 * size} {
			x, y := m.at(x, y)
			b.left, b.right, b.top, b.bottom = min(b.left, x), max(b.right, x), min(b.top, y), max(b.bottom, y)
		}
	}
	return b
}
