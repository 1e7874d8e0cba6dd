package results

import (
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func memoryExample() *Plot {
	return &Plot{Title: "trace <1> & more", Note: "a note", XLabel: "calls of the allocator",
		Areas: []Area{
			{Name: "reserved", Values: []int64{0, 4 << 30, 4 << 30, 8 << 30}},
			{Name: "allocated", Values: []int64{0, 3 << 30, 1 << 30, 7 << 30}},
		},
		Lines: []Line{{Name: "recorded", Value: 9 << 30}}}
}

// texts returns all text elements of a well-formed picture.
func texts(t *testing.T, svg string) (list []string) {
	t.Helper()
	require.NotContains(t, svg, "%!")
	d := xml.NewDecoder(strings.NewReader(svg))
	inText := false
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return list
		}
		require.NoError(t, err)
		switch tok := tok.(type) {
		case xml.StartElement:
			inText = tok.Name.Local == "text"
			for _, a := range tok.Attr {
				require.NotContains(t, a.Value, "NaN")
				require.NotContains(t, a.Value, "Inf")
				if a.Name.Local != "xmlns" {
					require.NotContains(t, a.Value, "http", "the picture needs nothing from elsewhere")
				}
			}
		case xml.CharData:
			if inText && strings.TrimSpace(string(tok)) != "" {
				list = append(list, string(tok))
			}
		}
	}
}

func TestSVG(t *testing.T) {
	var b strings.Builder
	require.NoError(t, memoryExample().WriteSVG(&b))
	got := texts(t, b.String())
	require.ElementsMatch(t, []string{"trace <1> & more", "reserved, at most 8 GiB", "allocated, at most 7 GiB", "recorded 9 GiB",
		"0 B", "2 GiB", "4 GiB", "6 GiB", "8 GiB", "10 GiB", "0", "1", "2", "3", "4", "calls of the allocator", "memory in bytes", "a note"}, got)
}

// Each value holds until the next, and the area is closed.
func TestOutline(t *testing.T) {
	c := memoryExample().chart()
	const g = 1 << 30
	require.Equal(t, []Point{{X: 0}, {X: 0}, {X: 1}, {X: 1, Y: 3 * g}, {X: 2, Y: 3 * g}, {X: 2, Y: g}, {X: 3, Y: g}, {X: 3, Y: 7 * g}, {X: 4, Y: 7 * g}, {X: 4}}, c.Series[1].Points)
	require.Equal(t, []Point{{X: 0, Y: 9 * g}, {X: 4, Y: 9 * g}}, c.Series[2].Points)
}

func TestHTML(t *testing.T) {
	var b strings.Builder
	require.NoError(t, memoryExample().WriteHTML(&b))
	require.Contains(t, b.String(), "<title>trace &lt;1&gt; &amp; more</title>")
	require.Contains(t, b.String(), memoryExample().chart().SVG())
	require.NotContains(t, b.String(), "http")
}

// A peak of one value among many is drawn, and the file stays small.
func TestManyValues(t *testing.T) {
	values := make([]int64, 1_000_000)
	for i := range values {
		values[i] = int64(i % 2)
	}
	values[777_777] = 1 << 40
	p := &Plot{Areas: []Area{{Name: "a", Values: values}}}
	var b strings.Builder
	require.NoError(t, p.WriteSVG(&b))
	require.Contains(t, texts(t, b.String()), "a, at most 1 TiB")
	require.Less(t, b.Len(), 60_000)
	require.True(t, slices.ContainsFunc(p.chart().Series[0].Points, func(q Point) bool { return q.Y == 1<<40 }))
}

// The axis counts events if a value stands for several.
func TestStep(t *testing.T) {
	p := memoryExample()
	p.Step = 100
	var b strings.Builder
	require.NoError(t, p.WriteSVG(&b))
	require.Contains(t, texts(t, b.String()), "400")
	points := p.chart().Series[0].Points
	require.Equal(t, 400.0, points[len(points)-1].X)
}

func TestEmpty(t *testing.T) {
	var b strings.Builder
	require.NoError(t, (&Plot{Areas: []Area{{}, {Values: []int64{0}}}}).WriteSVG(&b))
	texts(t, b.String())
	require.ErrorIs(t, (&Plot{}).WriteSVG(broken{}), errBroken)
	require.ErrorIs(t, (&Plot{}).WriteHTML(broken{}), errBroken)
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 7734391296: "7.2 GiB", 1 << 62: "4 EiB"} {
		require.Equal(t, want, Bytes(n))
	}
}

func TestMemoryTicks(t *testing.T) {
	for n, want := range map[int]int{1: 1, 8: 1, 9: 2, 17: 2, 18: 5, 17557: 2000, 1_000_000: 200_000} {
		require.Equal(t, want, decimalStep(n), "%d", n)
	}
	for _, most := range []int64{1, 7, 8, 1000, 8321499136, 1 << 60} {
		s := (&Plot{Lines: []Line{{Value: most}}}).scale()
		require.Greater(t, s.most, most)
		require.LessOrEqual(t, s.most/s.step, int64(mostTicks))
		require.GreaterOrEqual(t, s.most/s.step, int64(2))
	}
}
