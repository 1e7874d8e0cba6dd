package safetensors

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The most that reading allocates, in all and not only at once, for each byte of the
// header or index; doc.go promises it.
const (
	mostForTensors  = 3 // when no shape has many dimensions
	mostForHeader   = 6
	mostForMetadata = 12
)

// worstMap is a number of keys for which a Go map has the most room left over.
const worstMap = 7<<18/8 + 1

// many repeats an entry, with a number of its own in each, up to that many bytes.
func many(bytes int, entry func(i int) string) string {
	var b strings.Builder
	b.Grow(bytes + 128)
	for i := 0; b.Len() < bytes; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(entry(i))
	}
	return b.String()
}

// key is the shortest unlike text for every number below 2²⁴.
func key(i int) string {
	const digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"
	return string([]byte{digits[i&63], digits[i>>6&63], digits[i>>12&63], digits[i>>18&63]})
}

func TestMemoryIsBounded(t *testing.T) {
	const size = 2 << 20
	const rest = `"dtype":"U8","data_offsets":[0,0]`
	dims := func(n int) string { return "[0" + strings.Repeat(",0", n-1) + "]" }
	for _, c := range []struct {
		name   string
		most   float64
		wrong  string // part of the error, "" for a header that is right
		header string
	}{
		{"entries without anything", mostForTensors, "missing", "{" + many(size, func(i int) string { return `"` + key(i) + `":{}` }) + "}"},
		{"empty tensors", mostForTensors, "", "{" + many(size, func(i int) string {
			return `"` + key(i) + `":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`
		}) + "}"},
		{"names with escapes", mostForTensors, "", "{" + many(size, func(i int) string {
			return `"\n` + key(i) + `":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`
		}) + "}"},
		{"overlapping tensors", mostForTensors, "overlap", "{" + many(size, func(i int) string {
			return fmt.Sprintf(`"%s":{"dtype":"U8","shape":[160000],"data_offsets":[%d,%d]}`, key(i), i, i+160000)
		}) + "}"},
		{"one name", mostForTensors, "duplicate", "{" + many(size, func(int) string {
			return `"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`
		}) + "}"},
		{"one shape", mostForHeader, "", `{"a":{` + rest + `,"shape":` + dims(size/2) + `}}`},
		{"shapes that just share", mostForHeader, "", "{" + many(size, func(i int) string {
			return `"` + key(i) + `":{` + rest + `,"shape":` + dims(512) + `}`
		}) + "}"},
		{"shapes that just do not share", mostForHeader, "", "{" + many(size, func(i int) string {
			return `"` + key(i) + `":{` + rest + `,"shape":` + dims(513) + `}`
		}) + "}"},
		{"a shape of commas", mostForHeader, "a dimension", `{"a":{"shape":[` + strings.Repeat(",", size)},
		{"a shape twice", mostForHeader, "twice", `{"a":{` + many(size, func(int) string { return `"shape":` + dims(4000) }) + `}}`},
		{"a name of braces", mostForHeader, "", `{"` + strings.Repeat("{", size) + `":{` + rest + `,"shape":[0]}}`},
		{"values that are passed over", mostForHeader, "", `{"a":{` + rest + `,"shape":[0],"x":[` + many(size, func(i int) string { return `["\n",{}]` }) + `]}}`},
		{"one string of escapes", mostForHeader, "", `{"` + strings.Repeat(`\n`, size/2) + `":{` + rest + `,"shape":[0]}}`},
		{"arrays in arrays", mostForHeader, "deep", `{"a":{"x":` + strings.Repeat("[", size)},
		{"spaces", mostForHeader, "", "{}" + strings.Repeat(" ", size)},
		{"metadata", mostForMetadata, "", `{"__metadata__":{` + many(10*worstMap, func(i int) string { return `"` + key(i) + `":""` }) + `}}`},
		{"metadata with escapes", mostForMetadata, "", `{"__metadata__":{` + many(14*worstMap, func(i int) string { return `"\n` + key(i) + `":"\n"` }) + `}}`},
		{"metadata twice", mostForMetadata, "duplicate", `{"__metadata__":{` + many(8*worstMap, func(i int) string { return `"":""` }) + `}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := file(c.header, 0)
			requireAllocates(t, c.most, len(text), c.wrong, func() error {
				_, err := parse(text)
				return err
			})
		})
	}
}

// requireAllocates fails when f, which reads so many bytes, allocates more than most
// for each of them.
func requireAllocates(t *testing.T, most float64, bytes int, wrong string, f func() error) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := f()
	runtime.ReadMemStats(&after)
	if wrong == "" {
		require.NoError(t, err)
	} else {
		require.ErrorContains(t, err, wrong)
	}
	each := float64(after.TotalAlloc-before.TotalAlloc) / float64(bytes)
	t.Logf("%.2f bytes for each of %d", each, bytes)
	require.LessOrEqual(t, each, most)
}

func TestIndexMemoryIsBounded(t *testing.T) {
	const size = 2 << 20
	for _, c := range []struct{ name, wrong, text string }{
		{"tensors", "", `{"weight_map":{` + many(11*worstMap, func(i int) string { return `"` + key(i) + `":"a"` }) + `}}`},
		{"files", "", `{"weight_map":{` + many(14*worstMap, func(i int) string { return `"` + key(i) + `":"` + key(i) + `"` }) + `}}`},
		{"names with escapes", "", `{"weight_map":{` + many(14*worstMap, func(i int) string { return `"\n` + key(i) + `":"\""` }) + `}}`},
		{"metadata", "", `{"weight_map":{},"metadata":{` + many(size, func(i int) string { return `"` + key(i) + `":"\n"` }) + `}}`},
		{"one name", "duplicate", `{"weight_map":{` + many(8*worstMap, func(int) string { return `"":"a"` }) + `}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			requireAllocates(t, mostForMetadata, len(c.text), c.wrong, func() error {
				_, err := ReadIndex(strings.NewReader(c.text), int64(len(c.text)))
				return err
			})
		})
	}
}
