package memory

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/gochorus/chorus/internal/pickle"
	"github.com/gochorus/chorus/internal/safefile"
)

// ReadSnapshot reads a snapshot that Chorus or torch's memory._dump_snapshot has
// written: a pickle or JSON, optionally compressed by gzip. It ignores
// unknown keys, and most keys may be missing; blocks without an address get one from
// their segment. Any input is safe: pickles run no code. Input of more than 2 GiB or 64
// million values is an error, and so is compressed input that expands to more than 64
// times its size plus 1 MiB. Values that entries share, such as frames, are also shared
// in the result.
func ReadSnapshot(r io.Reader) (*Snapshot, error) {
	v, err := readValue(r, nil)
	if err != nil {
		return nil, readError(err)
	}
	s, err := snapshotOf(v)
	if err != nil {
		return nil, readError(err)
	}
	return s, nil
}

func readError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("the file ends too early: it was cut off: write or copy it again: %w", err)
	}
	return fmt.Errorf("memory: read a snapshot: %w", err)
}

const (
	mostSnapshotBytes, mostSnapshotValues = 2 << 30, 64 << 20

	tracesKey = "device_traces"
)

// readValue reads the values of a snapshot. If pass is not nil, it gets the entries of the
// traces, which are then not kept.
func readValue(packed io.Reader, pass func(device int, entry any) error) (any, error) {
	plain, err := safefile.Unzip(packed)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(plain)
	start, err := r.Peek(1)
	switch {
	case err == io.EOF:
		return nil, errors.New("the file is empty")
	case err != nil:
		return nil, err
	}
	limits := &pickle.Limits{Bytes: mostSnapshotBytes, Values: mostSnapshotValues}
	switch {
	case start[0] == 0x80 && pass != nil:
		return pickle.DecodeItems(r, limits, tracesKey, pass)
	case start[0] == 0x80:
		return pickle.Decode(r, limits)
	}
	j := &jsonReader{d: json.NewDecoder(io.LimitReader(r, mostSnapshotBytes)), pass: pass}
	j.d.UseNumber()
	v, err := j.value(0)
	if j.mistake != nil {
		return nil, j.mistake
	}
	if safefile.EndsEarly(err) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("neither a pickle nor JSON of at most %d bytes: at byte %d: %w", mostSnapshotBytes, j.d.InputOffset(), err)
	}
	return v, nil
}

// A jsonReader reads JSON into the values of package pickle.
type jsonReader struct {
	d      *json.Decoder
	values int

	pass    func(device int, entry any) error // or nil
	mistake error                             // in valid JSON
}

func (j *jsonReader) value(depth int) (any, error) {
	if j.values++; j.values > mostSnapshotValues || depth > 32 {
		return nil, fmt.Errorf("more than %d values, or more than 32 deep", mostSnapshotValues)
	}
	t, err := j.d.Token()
	if err != nil {
		return nil, err
	}
	return j.valueOf(t, depth)
}

// valueOf returns the value that begins with a token.
func (j *jsonReader) valueOf(t json.Token, depth int) (any, error) {
	switch t := t.(type) {
	case json.Delim:
		if t == '[' {
			return j.list(depth)
		}
		return j.dict(depth)
	case json.Number:
		if n, err := strconv.ParseInt(t.String(), 10, 64); err == nil {
			return n, nil
		}
		if n, err := strconv.ParseUint(t.String(), 10, 64); err == nil {
			return n, nil
		}
		return t.Float64()
	}
	return t, nil
}

func (j *jsonReader) list(depth int) (any, error) {
	l := &pickle.List{}
	for j.d.More() {
		v, err := j.value(depth + 1)
		if err != nil {
			return nil, err
		}
		*l = append(*l, v)
	}
	_, err := j.d.Token()
	return l, err
}

func (j *jsonReader) dict(depth int) (any, error) {
	d := &pickle.Dict{}
	for j.d.More() {
		key, err := j.d.Token()
		if err != nil {
			return nil, err
		}
		read := j.value
		if j.pass != nil && depth == 0 && key == tracesKey {
			read = j.traces
		}
		v, err := read(depth + 1)
		if err != nil {
			return nil, err
		}
		*d = append(*d, pickle.Item{Key: key, Value: v})
	}
	_, err := j.d.Token()
	return d, err
}

// traces reads the traces of all devices and passes their entries on.
func (j *jsonReader) traces(depth int) (any, error) {
	return j.each(depth, func(device int) error {
		entries, err := j.each(depth+1, func(int) error {
			before := j.values
			entry, err := j.value(depth + 2)
			if err != nil {
				return err
			}
			j.values = before
			return j.pass(device, entry)
		})
		if _, ok := entries.(*pickle.List); err == nil && !ok {
			j.mistake = fmt.Errorf("trace %d: it is %s: want a list", device, describe(entries))
			err = j.mistake
		}
		return err
	})
}

// each calls read for each value of a list, and returns an empty list. It returns the value
// if that is not a list.
func (j *jsonReader) each(depth int, read func(i int) error) (any, error) {
	t, err := j.d.Token()
	if err != nil {
		return nil, err
	}
	if t != json.Delim('[') {
		return j.valueOf(t, depth)
	}
	for i := 0; j.d.More(); i++ {
		if err := read(i); err != nil {
			return nil, err
		}
	}
	_, err = j.d.Token()
	return &pickle.List{}, err
}
