package safefile

import (
	"encoding/json"
	"errors"
	"io"
)

// EndsEarly reports whether a decoder failed because its file is truncated.
func EndsEarly(err error) bool {
	if s, ok := errors.AsType[*json.SyntaxError](err); ok {
		return s.Error() == "unexpected end of JSON input" // of Decoder.Token after Decoder.More, since Go 1.27
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
