package safe

import (
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text escapes all characters of s that are not graphic, including line ends: a
// control character becomes \x1b, others \u202e, and bytes that are not UTF-8
// \xff.
func Text(s string) string { return quote(s, "") }

// Lines is Text except that it keeps line ends and tabs.
func Lines(s string) string { return quote(s, "\n\t") }

func quote(s, leave string) string {
	first := firstOdd(s, leave)
	if first == len(s) {
		return s
	}
	var b strings.Builder
	b.WriteString(s[:first])
	for i := first; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1, r < 0x100 && !fine(r, leave):
			fmt.Fprintf(&b, `\x%02x`, byteOf(r, s[i]))
		case fine(r, leave):
			b.WriteString(s[i : i+n])
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
		i += n
	}
	return b.String()
}

// byteOf returns the number of a control character, or the byte if r is invalid.
func byteOf(r rune, b byte) byte {
	if r == utf8.RuneError {
		return b
	}
	return byte(r)
}

func fine(r rune, leave string) bool {
	return unicode.IsGraphic(r) || strings.ContainsRune(leave, r)
}

// firstOdd returns the position of the first character to quote, or len(s).
func firstOdd(s, leave string) int {
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf {
			if (c < ' ' || c == 0x7f) && strings.IndexByte(leave, c) < 0 {
				return i
			}
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 || !fine(r, leave) {
			return i
		}
		i += n
	}
	return len(s)
}

// NewWriter returns a writer that applies Lines to each Write, which must
// contain whole characters.
func NewWriter(w io.Writer) io.Writer { return &writer{w} }

type writer struct{ w io.Writer }

func (w *writer) Write(b []byte) (int, error) {
	if _, err := io.WriteString(w.w, Lines(string(b))); err != nil {
		return 0, err
	}
	return len(b), nil
}

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

// WrapNames joins names by commas to lines of at most width bytes.
func WrapNames(names []string, width int) (lines []string) {
	line := ""
	for i, s := range names {
		if i < len(names)-1 {
			s += ","
		}
		if line != "" && len(line)+1+len(s) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+s, " ")
	}
	return append(lines, line)
}
