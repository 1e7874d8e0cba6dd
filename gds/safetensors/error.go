package safetensors

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// A FormatError describes a violation of the format in a header or an index. It
// does not contain the file's name: the caller that opened the file adds it.
type FormatError struct {
	Name   string // name of the tensor, truncated if long; "" if the error does not concern a tensor
	Offset int64  // position of the error in the file in bytes
	Reason string
}

func (e *FormatError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("safetensors: byte %d: %s", e.Offset, e.Reason)
	}
	return fmt.Sprintf("safetensors: byte %d: tensor %q: %s", e.Offset, e.Name, e.Reason)
}

// An IndexError describes a contradiction between an index and its files.
type IndexError struct {
	File   string
	Name   string // name of the tensor; "" if the error concerns the file
	Reason string // includes the name of the tensor
}

func (e *IndexError) Error() string {
	return fmt.Sprintf("safetensors: index: %q: %s", short(e.File), e.Reason)
}

// misfit returns an IndexError about a tensor.
func misfit(file, name, format string, args ...any) error {
	return &IndexError{File: file, Name: name, Reason: fmt.Sprintf("tensor %q ", short(name)) + fmt.Sprintf(format, args...)}
}

// short truncates text from a file for an error. It returns a copy, so that the
// error does not keep the header in memory.
func short(s string) string {
	const most = 120
	if len(s) <= most {
		return strings.Clone(s)
	}
	cut := most
	for !utf8.RuneStart(s[cut]) && cut > most-utf8.UTFMax {
		cut--
	}
	return s[:cut] + "…"
}
