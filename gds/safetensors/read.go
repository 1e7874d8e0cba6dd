package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

const prefix = 8 // bytes of the header's length

// ReadHeader reads the header of a file of size bytes and validates it against
// all rules of the format, including that the tensors fill the file exactly.
// Invalid content is a *FormatError; other errors come from r. It reads only the
// header, which stays in memory while one of its names is in use.
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	text, err := readText(r, size)
	if err != nil {
		return nil, err
	}
	h := &Header{DataOffset: prefix + int64(len(text)), Size: size}
	if err := h.parse(text); err != nil {
		return nil, err
	}
	return h, nil
}

// readText returns the header's JSON. It compares the length with the file before
// it allocates memory.
func readText(r io.ReaderAt, size int64) (string, error) {
	if size < prefix {
		return "", &FormatError{Reason: fmt.Sprintf("the file has %d bytes: want at least %d, the length of the header", max(size, 0), prefix)}
	}
	var length [prefix]byte
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, prefix), length[:]); err != nil {
		return "", readError(0, prefix, err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader {
		return "", &FormatError{Reason: fmt.Sprintf("the header has %d bytes by its length: want at most %d; the file may not be a safetensors file", n, maxHeader)}
	}
	if int64(n) > size-prefix {
		return "", &FormatError{Reason: fmt.Sprintf("the header has %d bytes by its length, but only %d follow: the file is truncated, or is not a safetensors file", n, size-prefix)}
	}
	return readString(r, prefix, int64(n))
}

// readString reads n bytes of UTF-8, starting at offset.
func readString(r io.ReaderAt, offset, n int64) (string, error) {
	var b strings.Builder
	b.Grow(int(n))
	if got, err := io.CopyN(&b, io.NewSectionReader(r, offset, n), n); err != nil {
		return "", readError(offset+got, offset+n, err)
	}
	text := b.String()
	if utf8.ValidString(text) {
		return text, nil
	}
	return "", &FormatError{Offset: offset + invalid(text), Reason: "the JSON is not valid UTF-8"}
}

// invalid returns the position of the first invalid UTF-8 in text.
func invalid(text string) int64 {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if r == utf8.RuneError && n == 1 {
			return int64(i)
		}
		i += n
	}
	return int64(len(text))
}

func readError(from, to int64, err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("safetensors: read bytes %d to %d: %w", from, to, err)
}
