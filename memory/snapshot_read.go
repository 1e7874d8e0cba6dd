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

// ReadSnapshot reads a snapshot that Chorus has written or torch's
// memory._dump_snapshot has: a pickle or JSON, either also compressed by gzip.
// Keys that it does not know it passes over, and most may be missing; blocks
// without an address get it from their segment. Any input is safe: pickles run
// no code, and one of more than 2 GiB or 64 million values is an error, as is a
// compressed one that becomes more than 64 times as long and 1 MiB. What
// several entries share, such as frames, they share in the result too.
func ReadSnapshot(r io.Reader) (*Snapshot, error) {
	v, err := readValue(r)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("the file ends too early: it was cut off: write or copy it again: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("memory: read a snapshot: %w", err)
	}
	s, err := snapshotOf(v)
	if err != nil {
		return nil, fmt.Errorf("memory: read a snapshot: %w", err)
	}
	return s, nil
}

const mostSnapshotBytes, mostSnapshotValues = 2 << 30, 64 << 20

func readValue(packed io.Reader) (any, error) {
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
	if start[0] == 0x80 {
		return pickle.Decode(r, &pickle.Limits{Bytes: mostSnapshotBytes, Values: mostSnapshotValues})
	}
	j := &jsonReader{d: json.NewDecoder(io.LimitReader(r, mostSnapshotBytes))}
	j.d.UseNumber()
	v, err := j.value(0)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("neither a pickle nor JSON of at most %d bytes: at byte %d: %w", mostSnapshotBytes, j.d.InputOffset(), err)
	}
	return v, nil
}

// A jsonReader reads JSON as the values that a pickle has.
type jsonReader struct {
	d      *json.Decoder
	values int
}

func (j *jsonReader) value(depth int) (any, error) {
	if j.values++; j.values > mostSnapshotValues || depth > 32 {
		return nil, fmt.Errorf("more than %d values, or more than 32 deep", mostSnapshotValues)
	}
	t, err := j.d.Token()
	if err != nil {
		return nil, err
	}
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
		v, err := j.value(depth + 1)
		if err != nil {
			return nil, err
		}
		*d = append(*d, pickle.Item{Key: key, Value: v})
	}
	_, err := j.d.Token()
	return d, err
}
