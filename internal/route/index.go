package route

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/memory"
)

// An Index has the strategies for every operation, by measured times.
type Index [flight.NumKinds][numDTypes][flight.NumReductions]*Measurements

// numDTypes is the number of element types plus one.
const numDTypes = memory.Float8E5M2 + 1

// Measurements has the strategies for one operation, by size.
type Measurements struct {
	Aligned, Odd []Measured // for multiples of 16 bytes, and for other sizes
}

// A Measured has the strategies for one size.
type Measured struct {
	Bytes           int
	Captured, Eager []Strategy // the fastest first
}

// reduces reports whether the times of a collective depend on its type and reduction.
func reduces(k flight.Kind) bool { return k == flight.AllReduce || k == flight.ReduceScatter }

// isOdd reports whether a number of bytes is not a multiple of 16.
func isOdd(bytes int) bool { return bytes%16 != 0 }

// find returns the strategies for x, the fastest first. It uses the entry whose size has the
// nearest logarithm.
func (t *Index) find(x *ranks.Collective) []Strategy {
	bytes := x.Bytes()
	if t == nil || bytes == 0 || x.DType >= numDTypes {
		return nil
	}
	m := t[x.Kind][0][0]
	if reduces(x.Kind) {
		if x.Op < 0 || x.Op >= flight.NumReductions {
			return nil
		}
		m = t[x.Kind][x.DType][x.Op]
	}
	if m == nil {
		return nil
	}
	list := m.Aligned
	if isOdd(bytes) {
		list = m.Odd
	}
	if len(list) == 0 {
		return nil
	}
	i, most := 0, len(list)-1
	for i < most {
		if mid := (i + most + 1) / 2; nearer(list[mid].Bytes, list[mid-1].Bytes, bytes) {
			i = mid
		} else {
			most = mid - 1
		}
	}
	if x.Captured {
		return list[i].Captured
	}
	return list[i].Eager
}

// nearer reports whether n, on a logarithmic scale, is at least as near to the larger of two
// sizes as to the smaller one.
func nearer(larger, smaller, n int) bool {
	return float64(n)*float64(n) >= float64(larger)*float64(smaller)
}
