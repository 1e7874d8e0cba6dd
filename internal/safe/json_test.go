package safe

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// readJSON returns the numbers of the list "n" of an object, whose other keys it skips.
func readJSON(text string, most int64) (list []int, err error) {
	f := NewJSON(strings.NewReader(text), most)
	err = f.Object(func(key string) error {
		if key != "n" {
			return f.Skip()
		}
		return f.Each(key, func(int) error {
			var n int
			err := f.Value(key, &n)
			list = append(list, n)
			return err
		})
	})
	return list, err
}

func TestJSON(t *testing.T) {
	list, err := readJSON(`{"a": {"n": [9]}, "n": [1, 2], "b": [[]]}`, 100)
	require.NoError(t, err)
	require.Equal(t, []int{1, 2}, list)
	for text, want := range map[string]string{
		`[1]`:           "the value is a JSON array: want an object",
		`{"n": 1}`:      `"n" is a JSON float, at byte 7: want a list`,
		`{"n": [true]}`: `"n" is a JSON bool, at byte 11: want another type`,
		`{"n": [1`:      "the file is truncated",
		`{"n": [1,}`:    "invalid character",
	} {
		_, err := readJSON(text, 100)
		require.ErrorContains(t, err, want, text)
	}
}

// TestManyObjects: objects of a few bytes would take much more memory than the file.
func TestManyObjects(t *testing.T) {
	text := `{"a": [` + strings.Repeat("{},", fewObjects+fewObjects/4) + `{}]}`
	_, err := readJSON(text, 1<<20)
	require.ErrorContains(t, err, "bytes of JSON: want at most 65536 and one for each 24 bytes")
	require.ErrorContains(t, CheckObjects([]byte(text)), "bytes of JSON")
	require.NoError(t, CheckObjects([]byte(strings.ReplaceAll(text, "{}", `{"key": "of 25 bytes..."}`))))
}

// The limit is for each value, not for the file. The decoder reads in blocks, so that values are
// much larger here.
func TestJSONLimit(t *testing.T) {
	value := strings.Repeat(" ", 1<<16) + "1"
	list, err := readJSON(`{"n": [`+strings.Repeat(value+",", 50)+value+`]}`, 1<<18)
	require.NoError(t, err)
	require.Len(t, list, 51)
	_, err = readJSON(`{"n": [`+strings.Repeat(" ", 1<<20)+"1]}", 1<<18)
	require.ErrorContains(t, err, "more than 262144 bytes")
}

func TestJSONErrorOfItem(t *testing.T) {
	wrong := errors.New("wrong")
	f := NewJSON(strings.NewReader(`[1, 2]`), 100)
	require.ErrorIs(t, f.List("n", func(i int, text []byte) error {
		require.Equal(t, "1", string(text))
		return wrong
	}), wrong)
}
