package perf

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// dtypes maps the names of nccl-tests to types, in the order of NCCL's numbers.
var dtypes = []struct {
	name string
	t    memory.DType
}{
	{"int8", memory.Int8}, {"uint8", memory.Uint8}, {"int32", memory.Int32}, {"uint32", memory.Uint32},
	{"int64", memory.Int64}, {"uint64", memory.Uint64}, {"half", memory.Float16}, {"float", memory.Float32},
	{"double", memory.Float64}, {"bfloat16", memory.BFloat16}, {"f8e4m3", memory.Float8E4M3}, {"f8e5m2", memory.Float8E5M2},
}

// ParseDTypes returns the types for a name of nccl-tests or of package memory, or
// all types for "all".
func ParseDTypes(name string) ([]memory.DType, error) {
	var list []memory.DType
	names := make([]string, len(dtypes))
	for i, d := range dtypes {
		names[i] = d.name
		if name == "all" || name == d.name || name == d.t.String() {
			list = append(list, d.t)
		}
	}
	if list == nil {
		return nil, fmt.Errorf("unknown element type %q: want all or one of %s", name, strings.Join(names, ", "))
	}
	return list, nil
}

// dtypeName returns the name of nccl-tests.
func dtypeName(t memory.DType) string {
	for _, d := range dtypes {
		if d.t == t {
			return d.name
		}
	}
	return t.String()
}

// bits returns the bits of x converted to a type: rounded to the nearest value
// for floats, and toward zero for integers.
func bits(t memory.DType, x float64) uint64 {
	switch t {
	case memory.Float16:
		return uint64(memory.Float16Of(float32(x)))
	case memory.BFloat16:
		return uint64(memory.BFloat16Of(float32(x)))
	case memory.Float8E4M3:
		return uint64(memory.Float8E4M3Of(float32(x)))
	case memory.Float8E5M2:
		return uint64(memory.Float8E5M2Of(float32(x)))
	case memory.Float32:
		return uint64(math.Float32bits(float32(x)))
	case memory.Float64:
		return math.Float64bits(x)
	}
	return uint64(int64(x))
}

// encode writes bits as elements of size bytes.
func encode(all []uint64, size int) []byte {
	var out []byte
	for _, b := range all {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], b)
		out = append(out, word[:size]...)
	}
	return out
}
