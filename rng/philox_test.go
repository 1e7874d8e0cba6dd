package rng

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// The known answers that the authors of Philox publish with Random123.
func TestPhiloxKnownAnswers(t *testing.T) {
	const all = 0xffffffff
	for _, k := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{all, all, all, all}, [2]uint32{all, all}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		require.Equal(t, k.want, philox(k.counter, k.key))
	}
}

// The counter has the offset in its low and the thread in its high half, and goes
// over 32 bits.
func TestWords(t *testing.T) {
	require.Equal(t, philox([4]uint32{2, 1, 7, 0}, [2]uint32{5, 9}), words(9<<32|5, 4*(1<<32-1), 7, 3))
}

func TestUnits(t *testing.T) {
	require.Equal(t, float32(1), unit32(math.MaxUint32))
	require.Equal(t, float32(0x1p-33), unit32(0))
	require.Equal(t, 1.0, unit64(1<<21-1, math.MaxUint32))
	require.Equal(t, 0x1p-54, unit64(0, 0))
}

// Every float16 and bfloat16 survives the way to float64 and back, and what lies
// between two goes to the nearer one, or to the even one.
func TestHalves(t *testing.T) {
	for b := range uint16(0x7c00) {
		h, bf := fromHalf(memoryHalf(b)), fromBFloat(memoryBFloat(b))
		require.Equal(t, b, uint16(toHalf(float32(h))))
		require.Equal(t, b, uint16(toBFloat(float32(bf))))
		require.Equal(t, b|0x8000, uint16(toHalf(math.Float32frombits(math.Float32bits(float32(h))|1<<31))))
		middle := float32((h + fromHalf(memoryHalf(b+1))) / 2)
		if b+1 == 0x7c00 {
			middle = 65520 // the first that is infinite
		}
		require.Equal(t, b+b&1, uint16(toHalf(middle)), "%v", middle)
		require.Equal(t, b, uint16(toHalf(math.Nextafter32(middle, 0))))
		require.Equal(t, b+1, uint16(toHalf(math.Nextafter32(middle, 1e9))))
		between := float32((bf + fromBFloat(memoryBFloat(b+1))) / 2)
		require.Equal(t, b+b&1, uint16(toBFloat(between)), "%v", between)
	}
	require.Equal(t, uint16(0x7fff), uint16(toHalf(float32(math.NaN()))))
	require.Equal(t, uint16(0xfc00), uint16(toHalf(float32(math.Inf(-1)))))
}

// The shape of torch's fills on an H200. The numbers were worked out by hand.
func TestPolicy(t *testing.T) {
	p := policy{blocks: 132 * 8} // 270336 threads
	for _, c := range []struct {
		n, unroll int
		grid      uint32
		increment uint64
	}{
		{1, 4, 1, 4}, {256, 4, 1, 4}, {257, 4, 2, 4}, {270336, 4, 1056, 4}, {270337, 4, 1056, 4},
		{1081344, 4, 1056, 4}, {1081345, 4, 1056, 8}, {1048576, 2, 1056, 8}, {1 << 28, 4, 1056, 996},
	} {
		require.Equal(t, c.grid, p.grid(c.n), "%d", c.n)
		require.Equal(t, c.increment, p.increment(c.n, c.unroll), "%d", c.n)
	}
	// What 31 bits can address goes in one, else in halves.
	require.True(t, fits(1<<29, 4))
	require.False(t, fits(1<<29+1, 4))
	require.True(t, fits(math.MaxInt32, 1))
	require.False(t, fits(1<<31, 1))
	require.EqualValues(t, 996+996, p.advance(1<<29+1, 4, 4))
	require.EqualValues(t, 1988+(996+996), p.advance(1<<30+1, 4, 4))
}

// Bounds of floating-point types move inwards to numbers that they have.
func TestBoundsOfFloats(t *testing.T) {
	h, f := formatOf[float16](), formatOf[float32]()
	for _, c := range []struct {
		f            *format
		from, to     int64
		wantF, wantT int64
	}{
		{h, 0, 2049, 0, 2049},
		{h, 2049, 4095, 2049, 4095}, // from+1 and to-1 are even
		{h, 4097, 8191, 4100, 8188}, // 4098 rounds to 4096 and 8190 to 8192: outside
		{f, -(1 << 24) - 3, 5, -(1 << 24) - 3, 5},
		{f, 1 << 25, 1<<25 + 8, 1 << 25, 1<<25 + 4},
	} {
		from, to, err := checkFromTo(c.f, c.from, c.to)
		require.NoError(t, err)
		require.Equal(t, []int64{c.wantF, c.wantT}, []int64{from, to}, "%s from %d to %d", c.f.dtype, c.from, c.to)
	}
	_, _, err := checkFromTo(f, 1<<25, 1<<25+4)
	require.ErrorContains(t, err, "float32 has no number between them")
}
