package safetensors

import (
	"math"
	"strconv"
)

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
// exponent. what names it in errors.
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
