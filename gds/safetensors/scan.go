package safetensors

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A scanner parses JSON in a single pass. It allocates memory only for strings
// with escapes; other strings are parts of the text. After the first error, err
// is set and the scanner is at the end.
type scanner struct {
	text  string // valid UTF-8
	at    int
	base  int64  // position of the text in the file
	depth int    // number of open arrays and objects
	name  string // name of the current tensor, for errors
	err   *FormatError
}

// maxDepth limits the nesting of arrays and objects, as in the reference
// implementation's JSON parser.
const maxDepth = 127

func (s *scanner) fail(at int, format string, args ...any) {
	if s.err == nil {
		s.err = &FormatError{Name: short(s.name), Offset: s.base + int64(at), Reason: fmt.Sprintf(format, args...)}
		s.at = len(s.text)
	}
}

// peek skips white space and returns the next byte, or 0 at the end.
func (s *scanner) peek() byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; c {
		case ' ', '\n', '\r', '\t':
			s.at++
		default:
			return c
		}
	}
	return 0
}

// take skips the next byte if it is c.
func (s *scanner) take(c byte) bool {
	if s.peek() == c {
		s.at++
		return true
	}
	return false
}

// want skips the next byte, which must be c.
func (s *scanner) want(c byte, where string) bool {
	if s.take(c) {
		return true
	}
	s.fail(s.at, "want %q %s, got %s", c, where, s.got())
	return false
}

// got describes the next character for an error.
func (s *scanner) got() string {
	if s.at >= len(s.text) {
		return "the end"
	}
	r, _ := utf8.DecodeRuneInString(s.text[s.at:])
	return strconv.QuoteRune(r)
}

// end checks that only white space follows the complete value.
func (s *scanner) end() {
	if s.peek(); s.at < len(s.text) {
		s.fail(s.at, "want the end after the JSON, got %s", s.got())
	}
}

func (s *scanner) open(c byte, where string) bool {
	if !s.want(c, where) {
		return false
	}
	if s.depth++; s.depth > maxDepth {
		s.fail(s.at-1, "arrays and objects are nested more than %d levels deep", maxDepth)
	}
	return s.err == nil
}

// object calls member, which reads the value, for each key, with the position
// of the key.
func (s *scanner) object(where string, member func(at int, key string)) {
	if !s.open('{', where) {
		return
	}
	for more := !s.take('}'); more; more = s.next('}') {
		s.peek()
		at := s.at
		key := s.string("for a key")
		if s.want(':', "after a key") {
			member(at, key)
		}
	}
	s.depth--
}

// members counts the keys of the next object without reading it, so that a map
// of this size does not grow. Duplicate keys cannot make the count too large:
// after the first hundred, an entry with a unique key takes at least 8 bytes.
func (s *scanner) members(where string) int {
	ahead, n := *s, 0
	ahead.object(where, func(int, string) { n++; ahead.skip() })
	if ahead.err != nil {
		*s = ahead
		return 0
	}
	return min(n, 100+(ahead.at-s.at)/8)
}

// array calls element for each element; element reads it.
func (s *scanner) array(where string, element func()) {
	if !s.open('[', where) {
		return
	}
	for more := !s.take(']'); more; more = s.next(']') {
		element()
	}
	s.depth--
}

// next reports whether another element follows, after a comma.
func (s *scanner) next(closing byte) bool {
	if s.err != nil || s.take(closing) {
		return false
	}
	if !s.take(',') {
		s.fail(s.at, "want ',' or %q after a value, got %s", closing, s.got())
	}
	return s.err == nil
}

// skip reads and ignores a value of any kind.
func (s *scanner) skip() {
	switch c := s.peek(); c {
	case '{':
		s.object("for an object", func(int, string) { s.skip() })
	case '[':
		s.array("for an array", s.skip)
	case '"':
		s.quoted("for a string")
	case 't':
		s.literal("true")
	case 'f':
		s.literal("false")
	case 'n':
		s.literal("null")
	default:
		s.number()
	}
}

func (s *scanner) literal(word string) bool {
	if strings.HasPrefix(s.text[s.at:], word) {
		s.at += len(word)
		return true
	}
	s.fail(s.at, "want a JSON value, got %s", s.got())
	return false
}

// numeral skips and returns the characters of a number.
func (s *scanner) numeral() (at int, text string) {
	s.peek()
	at = s.at
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c >= '0' && c <= '9', c == '-', c == '+', c == '.', c == 'e', c == 'E':
			s.at++
			continue
		}
		break
	}
	return at, s.text[at:s.at]
}

// count reads an integer from 0 to the largest int64, without sign, fraction or
// exponent, and calls it what in errors.
func (s *scanner) count(what string) int64 {
	at, text := s.numeral()
	if text == "" {
		s.fail(at, "%s: want a whole number, got %s", what, s.got())
		return 0
	}
	n := int64(0)
	for i := range len(text) {
		d := int64(text[i]) - '0'
		if d < 0 || d > 9 || i == 1 && text[0] == '0' {
			s.fail(at, "%s is %s: want a whole number in digits alone", what, short(text))
			return 0
		}
		if n > (math.MaxInt64-d)/10 {
			s.fail(at, "%s is %s: want at most %d", what, short(text), int64(math.MaxInt64))
			return 0
		}
		n = n*10 + d
	}
	return n
}

// number reads and ignores any number. Like the reference implementation, it
// rejects numbers that overflow a float64.
func (s *scanner) number() {
	at, text := s.numeral()
	if text == "" {
		s.fail(at, "want a JSON value, got %s", s.got())
		return
	}
	if !numberGrammar(text) {
		s.fail(at, "%s is not a number in JSON", short(text))
		return
	}
	if _, err := strconv.ParseFloat(text, 64); err != nil {
		s.fail(at, "%s overflows a float64", short(text))
	}
}

// numberGrammar reports whether text is JSON's -?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?.
func numberGrammar(text string) bool {
	i := 0
	digits := func() bool {
		from := i
		for i < len(text) && text[i] >= '0' && text[i] <= '9' {
			i++
		}
		return i > from
	}
	if text[i] == '-' {
		i++
	}
	whole := i
	if !digits() || text[whole] == '0' && i > whole+1 {
		return false
	}
	if i < len(text) && text[i] == '.' {
		if i++; !digits() {
			return false
		}
	}
	if i < len(text) && (text[i] == 'e' || text[i] == 'E') {
		if i++; i < len(text) && (text[i] == '+' || text[i] == '-') {
			i++
		}
		if !digits() {
			return false
		}
	}
	return i == len(text)
}

// string reads a string, which is part of the text if it has no escapes.
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
