package safetensors

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// A FormatError says which rule of the format a header or an index breaks. It does
// not know the file's name: who opened the file adds it.
type FormatError struct {
	Name   string // of the tensor, "" when the fault is not one's; long ones are cut
	Offset int64  // of the fault in the file, bytes
	Reason string
}

func (e *FormatError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("safetensors: byte %d: %s", e.Offset, e.Reason)
	}
	return fmt.Sprintf("safetensors: byte %d: tensor %q: %s", e.Offset, e.Name, e.Reason)
}

// An IndexError says how an index and the files that it names do not fit together.
type IndexError struct {
	File   string
	Name   string // of the tensor, "" when the fault is the file's
	Reason string // with the tensor's name
}

func (e *IndexError) Error() string {
	return fmt.Sprintf("safetensors: index: %q: %s", short(e.File), e.Reason)
}

// misfit is an IndexError of a tensor.
func misfit(file, name, format string, args ...any) error {
	return &IndexError{File: file, Name: name, Reason: fmt.Sprintf("tensor %q ", short(name)) + fmt.Sprintf(format, args...)}
}

// short cuts what a file says to a length that a person reads. The copy does not
// keep the file's header in memory.
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
