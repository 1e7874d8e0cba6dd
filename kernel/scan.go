package kernel

import "strings"

// space has the white space of regular expressions.
const space = " \t\n\f\r"

// withoutComments replaces each comment of C++ code with a space.
func withoutComments(code string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(code, '/')
		if i < 0 {
			b.WriteString(code)
			return b.String()
		}
		n := commentLen(code[i:])
		if n == 0 {
			b.WriteString(code[:i+1])
			code = code[i+1:]
			continue
		}
		b.WriteString(code[:i])
		b.WriteByte(' ')
		code = code[i+n:]
	}
}

// commentLen returns the length of the comment at the start of code, or 0. A comment ends
// before its line's end, or with */; without one the slash is an operator.
func commentLen(code string) int {
	switch {
	case strings.HasPrefix(code, "//"):
		if n := strings.IndexByte(code, '\n'); n >= 0 {
			return n
		}
		return len(code)
	case strings.HasPrefix(code, "/*"):
		if n := strings.Index(code[2:], "*/"); n >= 0 {
			return n + 4
		}
	}
	return 0
}

// wordLen returns the length of the identifier or number at the start of code, or 0.
func wordLen(code string) int {
	for i := range len(code) {
		if !isWordByte(code[i]) {
			return i
		}
	}
	return len(code)
}

func startsWithWord(code string) bool { return code != "" && isWordByte(code[0]) }

func endsInWord(code string) bool { return code != "" && isWordByte(code[len(code)-1]) }

func isWordByte(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
