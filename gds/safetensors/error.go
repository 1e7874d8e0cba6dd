package safetensors

import "fmt"

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
	Reason string
}

func (e *IndexError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("safetensors: index: %s: %s", e.File, e.Reason)
	}
	return fmt.Sprintf("safetensors: index: %s: tensor %q: %s", e.File, short(e.Name), e.Reason)
}

// short cuts what a file says to a length that a person reads. The copy does not
// keep the file's header in memory.
func short(s string) string {
	const most = 120
	if len(s) <= most {
		return string([]byte(s))
	}
	return s[:most] + "…"
}
