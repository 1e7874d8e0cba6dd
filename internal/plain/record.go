package plain

import (
	"fmt"
	"reflect"
	"unicode/utf8"
)

// Record applies Text to all texts of the record that v points to, such as a message of
// another process. It changes texts in structs, slices, maps and pointers, but not keys of maps,
// interfaces and fields that encoding/json does not set.
func Record(v any) { each(reflect.ValueOf(v), Text) }

// ShortRecord is Record for records of processes that may be hostile: it also clips each text to
// n bytes.
func ShortRecord(v any, n int) {
	each(reflect.ValueOf(v), func(s string) string { return Clip(Text(Clip(s, n)), n) })
}

// ClipRecord applies Clip to all texts that Record would change.
func ClipRecord(v any, n int) {
	each(reflect.ValueOf(v), func(s string) string { return Clip(s, n) })
}

// LongestText returns the length of the longest text that Record would change.
func LongestText(v any) int {
	longest := 0
	each(reflect.ValueOf(v), func(s string) string {
		longest = max(longest, len(s))
		return s
	})
	return longest
}

// Clip shortens s to at most n bytes, and then ends it with how many bytes are missing.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	const most = len("... (9223372036854775807 more bytes)")
	head := max(n-most, 0)
	for head > 0 && !utf8.RuneStart(s[head]) {
		head--
	}
	short := s[:head] + fmt.Sprintf("... (%d more bytes)", len(s)-head)
	return short[:min(len(short), n)]
}

// each replaces all texts in v by the results of f.
func each(v reflect.Value, f func(string) string) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			each(v.Elem(), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if t := v.Type().Field(i); t.IsExported() || t.Anonymous {
				each(v.Field(i), f)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		for i := range v.Len() {
			each(v.Index(i), f)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			value := reflect.New(v.Type().Elem()).Elem() // elements of maps cannot be set in place
			value.Set(v.MapIndex(key))
			each(value, f)
			v.SetMapIndex(key, value)
		}
	case reflect.String:
		if s := f(v.String()); v.CanSet() {
			v.SetString(s)
		}
	}
}
