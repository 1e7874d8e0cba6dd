package results

import (
	"errors"
	"image/color"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func number(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }

// example has long texts, and values at the ends of both axes.
func example() *Chart {
	return &Chart{
		Title: strings.Repeat("a long title <1> & more, ", 8) + strings.Repeat("w", 200), Note: strings.Repeat("note ", 40),
		X: Powers("size", 1, 1<<40, func(v float64) string { return number(500+math.Log2(v)) + " MiB" }), Y: Decades("time in us", 0.00123, 4321987, number),
		Series: []Series{
			{Name: "all-reduce, float, sum, strategy with a very long name, in place", Points: []Point{{1, 0.00123, "<first>"}, {1 << 40, 4321987, "last"}}},
			{Name: "all-gather", Points: []Point{{1, 5, ""}, {1 << 40, 5, ""}}, Dashed: true},
			{Name: "broadcast", Points: []Point{{1, 50, ""}, {1 << 40, 5, ""}}, Filled: true},
		},
	}
}

func requireInside(t *testing.T, c *Chart) (texts []string) {
	t.Helper()
	list, width, height := boxes(t, c.SVG())
	require.NotEmpty(t, list)
	for i, b := range list {
		texts = append(texts, b.text)
		require.True(t, b.left >= 0 && b.right <= width && b.top >= 0 && b.bottom <= height, "%+v is not inside %v x %v", b, width, height)
		for _, o := range list[:i] {
			apart := b.left >= o.right || o.left >= b.right || b.top >= o.bottom || o.top >= b.bottom
			require.True(t, apart, "%+v covers %+v", b, o)
		}
	}
	return texts
}

// All texts are inside the picture, and do not cover each other.
func TestTexts(t *testing.T) {
	texts := requireInside(t, example())
	all := strings.Join(texts, "\n")
	for _, want := range []string{"a long title <1> & more,", "www…", "note", "size", "time in us", example().Series[0].Name} {
		require.Contains(t, all, want)
	}
	c := example()
	c.Title, c.Note = "short", ""
	for range 40 {
		c.Series = append(c.Series, c.Series[1])
	}
	requireInside(t, c)
	requireInside(t, &Chart{X: Linear("x", 0, 1, number), Y: Linear("y", 3, 1, number)})
}

// A curve is where its values are, and its marks show texts.
func TestMarks(t *testing.T) {
	c := &Chart{X: Powers("size", 1, 4, number), Y: Linear("y", 10, 5, number),
		Series: []Series{{Points: []Point{{1, 0, "<first>"}, {2, 5, "middle"}, {4, 10, "last"}}}}}
	svg := c.SVG()
	found := regexp.MustCompile(`<circle cx="([\d.]+)" cy="([\d.]+)" r="3" fill="#2f74c8"><title>(.*?)</title>`).FindAllStringSubmatch(svg, -1)
	require.Len(t, found, 3)
	x, y := func(i int) float64 { return parse(t, found[i][1]) }, func(i int) float64 { return parse(t, found[i][2]) }
	require.Equal(t, "&lt;first&gt;", found[0][3])
	require.InDelta(t, x(1)-x(0), x(2)-x(1), 0.2, "2 is in the middle of 1 and 4")
	require.InDelta(t, y(0)-y(1), y(1)-y(2), 0.2)
	require.Greater(t, x(1)-x(0), 250.0)
	require.Greater(t, y(0)-y(1), 100.0)
	// gonum draws the line with y upwards, through the same points.
	_, _, height := boxes(t, svg)
	line := regexp.MustCompile(`d="M([\d.]+),([\d.]+)L[^"]*" style="fill:none;stroke:#2F74C8`).FindStringSubmatch(svg)
	require.NotNil(t, line)
	require.InDelta(t, x(0), parse(t, line[1]), 0.1)
	require.InDelta(t, height-y(0), parse(t, line[2]), 0.1)
}

// Every axis has at least two ticks with a text, and not many more than mostTicks.
func TestTicks(t *testing.T) {
	for _, low := range []float64{1e-7, 0.3, 1, 7, 1000, 1024, 3e9} {
		for _, part := range []float64{1, 1.0001, 1.5, 2, 3, 10, 99, 1e4, 1e9} {
			high := low * part
			for name, a := range map[string]Axis{"powers": Powers("", low, high, number), "decades": Decades("", low, high, number), "linear": Linear("", high, high/3, number)} {
				require.LessOrEqual(t, a.low, low, "%s %v to %v", name, low, high)
				require.GreaterOrEqual(t, a.high, high, "%s %v to %v", name, low, high)
				require.True(t, len(a.ticks) >= 2 && len(a.ticks) <= mostTicks, "%s %v to %v: %v", name, low, high, a.ticks)
				for _, tick := range a.ticks {
					require.True(t, tick.Value >= a.low && tick.Value <= a.high, "%s %v to %v: %v", name, low, high, tick)
				}
			}
		}
	}
	values := func(a Axis) (list []string) {
		for _, tick := range a.ticks {
			list = append(list, tick.Label)
		}
		return list
	}
	require.Equal(t, []string{"5", "10", "20", "50"}, values(Decades("", 7, 30, number)))
	require.Equal(t, []string{"5", "10"}, values(Decades("", 5, 5, number)))
	require.Equal(t, []string{"1", "10", "100", "1000"}, values(Decades("", 1, 2000, number)))
	require.Equal(t, []string{"2", "4", "8"}, values(Powers("", 4, 4, number)))
	require.Equal(t, []string{"0", "5", "10"}, values(Linear("", 10, 5, number)))
}

// The colors are visible in both modes, and the drawing has no other color. gonum rounds
// a transparent color down.
func TestColors(t *testing.T) {
	for _, c := range Colors {
		for _, back := range []color.NRGBA{Light, Dark} {
			a, b := luminance(c), luminance(back)
			require.GreaterOrEqual(t, (max(a, b)+0.05)/(min(a, b)+0.05), 3.0, "%s on %s", hex(c), hex(back))
		}
	}
	svg := example().SVG()
	require.Contains(t, svg, "stroke:currentColor")
	for _, c := range regexp.MustCompile(`(?:fill|stroke):(#\w+)`).FindAllStringSubmatch(svg, -1) {
		require.Contains(t, []string{"#2F74C8", "#D04A4A", "#2F8F5B", "#2E8E5A"}, c[1], "gonum's own color does not follow the mode")
	}
}

// luminance is the relative luminance of WCAG 2.
func luminance(c color.NRGBA) float64 {
	linear := func(v uint8) float64 {
		x := float64(v) / 255
		if x <= 0.04045 {
			return x / 12.92
		}
		return math.Pow((x+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(c.R) + 0.7152*linear(c.G) + 0.0722*linear(c.B)
}

func TestFile(t *testing.T) {
	var b strings.Builder
	require.NoError(t, example().WriteSVG(&b))
	require.True(t, strings.HasPrefix(b.String(), `<svg class="chart" `))
	require.Equal(t, 1, strings.Count(b.String(), "http"), "the picture needs nothing from elsewhere")
	require.Contains(t, b.String(), ` xmlns="http://www.w3.org/2000/svg">`)
	require.Contains(t, b.String(), "prefers-color-scheme:dark")
	boxes(t, b.String())
	require.NotContains(t, example().SVG(), "http")
	require.ErrorIs(t, example().WriteSVG(broken{}), errBroken)
}

var errBroken = errors.New("broken")

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errBroken }
