package safetensors

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// string reads a string. A string without escapes is part of the text.
func (s *scanner) string(where string) string {
	raw, escapes := s.quoted(where)
	if !escapes {
		return raw
	}
	return unescape(raw)
}

// quoted reads a string and returns the text between its quotes. It checks all
// escapes, including surrogate pairs.
func (s *scanner) quoted(where string) (raw string, escapes bool) {
	if !s.want('"', where) {
		return "", false
	}
	from := s.at
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			return s.text[from : s.at-1], escapes
		case c == '\\':
			escapes = true
			if !s.escape() {
				return "", false
			}
		case c < ' ':
			s.fail(s.at, "a string has the control character %#02x, which must be escaped", c)
			return "", false
		default:
			s.at++
		}
	}
	s.fail(from-1, "a string does not end")
	return "", false
}

// escape skips an escape, or a surrogate pair.
func (s *scanner) escape() bool {
	at := s.at
	s.at += 2
	if s.at > len(s.text) {
		s.fail(at, "a string does not end")
		return false
	}
	switch c := s.text[at+1]; c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	case 'u':
	default:
		s.fail(at, "a string has the unknown escape %q", s.text[at:at+2])
		return false
	}
	r, ok := hex4(s.text[s.at:])
	if !ok {
		s.fail(at, `a string has "\u" without four hexadecimal digits`)
		return false
	}
	s.at += 4
	if !utf16.IsSurrogate(r) {
		return true
	}
	if low, ok := surrogate(s.text[s.at:]); ok && utf16.DecodeRune(r, low) != utf8.RuneError {
		s.at += 6
		return true
	}
	s.fail(at, `a string has half of a surrogate pair, "\u%04x", without the other`, r)
	return false
}

// surrogate returns the escape \uXXXX at the start of text.
func surrogate(text string) (rune, bool) {
	if !strings.HasPrefix(text, `\u`) {
		return 0, false
	}
	return hex4(text[2:])
}

func hex4(text string) (rune, bool) {
	if len(text) < 4 {
		return 0, false
	}
	n, err := strconv.ParseUint(text[:4], 16, 16)
	return rune(n), err == nil
}

// unescape returns the string represented by raw, which quoted has checked.
func unescape(raw string) string {
	var b strings.Builder
	b.Grow(len(raw))
	for {
		i := strings.IndexByte(raw, '\\')
		if i < 0 {
			b.WriteString(raw)
			return b.String()
		}
		b.WriteString(raw[:i])
		c := raw[i+1]
		raw = raw[i+2:]
		if c != 'u' {
			b.WriteByte(escaped[c])
			continue
		}
		r, _ := hex4(raw)
		raw = raw[4:]
		if utf16.IsSurrogate(r) {
			low, _ := surrogate(raw)
			r = utf16.DecodeRune(r, low)
			raw = raw[6:]
		}
		b.WriteRune(r)
	}
}

var escaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}
