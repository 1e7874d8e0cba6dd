package safe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// A JSONReader reads a large JSON file value by value, so that only one value is in memory.
type JSONReader struct {
	d *json.Decoder
	r *valueReader
}

// NewJSON returns a JSONReader of values that have at most about mostValueBytes, such as the events of a list.
func NewJSON(r io.Reader, mostValueBytes int64) *JSONReader {
	v := &valueReader{r: r, most: mostValueBytes}
	return &JSONReader{json.NewDecoder(v), v}
}

// A valueReader fails if more bytes are read than a value may have, or if they have too many objects.
type valueReader struct {
	r       io.Reader
	most    int64
	n       int64 // bytes read
	begin   int64 // of the current value
	objects int64
}

// Limits of objects in JSON. An empty object has 2 bytes, and a list of them can take 200 times its size in memory.
const (
	fewObjects    = 1 << 16 // of any size
	bytesOfObject = 24      // of further ones, on average
)

// CheckObjects returns an error if a JSON text has more objects than files of its size have. It counts braces in texts, too.
func CheckObjects(text []byte) error {
	return checkObjects(int64(bytes.Count(text, []byte("{"))), int64(len(text)))
}

func checkObjects(objects, size int64) error {
	if objects > fewObjects+size/bytesOfObject {
		return fmt.Errorf("%d objects in %d bytes of JSON: want at most %d and one for each %d bytes", objects, size, fewObjects, bytesOfObject)
	}
	return nil
}

func (v *valueReader) Read(b []byte) (int, error) {
	if v.n-v.begin > v.most {
		return 0, fmt.Errorf("the value at byte %d has more than %d bytes", v.begin, v.most)
	}
	n, err := v.r.Read(b)
	v.n += int64(n)
	v.objects += int64(bytes.Count(b[:n], []byte("{")))
	if err := checkObjects(v.objects, v.n); err != nil {
		return 0, err
	}
	return n, err
}

// token returns the next token.
func (f *JSONReader) token() (json.Token, error) {
	f.r.begin = f.d.InputOffset()
	t, err := f.d.Token()
	return t, f.err(err)
}

// Object reads an object, and calls field for each key to read its value.
func (f *JSONReader) Object(field func(key string) error) error {
	t, err := f.token()
	if err == nil && t != json.Delim('{') {
		return fmt.Errorf("the value is a JSON %s: want an object", kind(t))
	}
	for err == nil && f.d.More() {
		if t, err = f.token(); err == nil {
			err = field(t.(string)) // the decoder accepts only strings as keys
		}
	}
	if err == nil {
		_, err = f.token()
	}
	return err
}

// List reads the list of a key, and calls item with each value, which item must
// not keep.
func (f *JSONReader) List(key string, item func(i int, text []byte) error) error {
	var text json.RawMessage
	return f.Each(key, func(i int) error {
		f.r.begin = f.d.InputOffset()
		if err := f.d.Decode(&text); err != nil {
			return f.err(err)
		}
		return item(i, text)
	})
}

// Each reads the list of a key, and calls item to read each value.
func (f *JSONReader) Each(key string, item func(i int) error) error {
	t, err := f.token()
	if err == nil && t != json.Delim('[') {
		return fmt.Errorf("%q is a JSON %s, at byte %d: want a list", key, kind(t), f.d.InputOffset())
	}
	for i := 0; err == nil && f.d.More(); i++ {
		err = item(i)
	}
	if err == nil {
		_, err = f.token()
	}
	return err
}

// Value reads the value of a key.
func (f *JSONReader) Value(key string, to any) error {
	f.r.begin = f.d.InputOffset()
	err := f.d.Decode(to)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if wrong.Field != "" {
			key += "." + wrong.Field
		}
		return fmt.Errorf("%q is a JSON %s, at byte %d: want another type", key, wrong.Value, f.d.InputOffset())
	}
	return f.err(err)
}

// Skip reads a value and ignores it.
func (f *JSONReader) Skip() error {
	for depth := 0; ; {
		t, err := f.token()
		if err != nil {
			return err
		}
		switch t {
		case json.Delim('['), json.Delim('{'):
			depth++
		case json.Delim(']'), json.Delim('}'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}

// err explains an error of the decoder: a file that ends too early was
// truncated.
func (f *JSONReader) err(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Truncated(io.ErrUnexpectedEOF)
	}
	if _, wrong := errors.AsType[*json.SyntaxError](err); wrong && f.atEnd() {
		return Truncated(err)
	}
	return err
}

// Truncated adds a hint to the error of a truncated file.
func Truncated(err error) error {
	return fmt.Errorf("the file is truncated: record or copy it again: %w", err)
}

// atEnd reports whether at most one character is left.
func (f *JSONReader) atEnd() bool {
	b, err := io.ReadAll(io.LimitReader(io.MultiReader(f.d.Buffered(), f.r.r), 64))
	return err == nil && len(bytes.TrimSpace(b)) <= 1
}

// kind returns JSON's name of the value that a token begins.
func kind(t json.Token) string {
	switch t := t.(type) {
	case json.Delim:
		return map[json.Delim]string{'{': "object", '[': "array"}[t]
	case nil:
		return "null"
	case bool:
		return "bool"
	}
	return strings.TrimSuffix(fmt.Sprintf("%T", t), "64") // "string" or "float"
}
