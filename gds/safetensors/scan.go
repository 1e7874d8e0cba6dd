package safetensors

import (
	"fmt"
	"strconv"
	"strings"
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

// object calls member for each key; member reads the value. at is the position of the key.
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

// members counts the keys of the next object without reading it. A map of this
// size does not grow. Duplicate keys cannot make it too large: after the first
// hundred, an entry with a unique key takes at least 8 bytes.
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
