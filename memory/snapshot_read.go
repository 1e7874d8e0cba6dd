package memory

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/torchfile"
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
	plain, err := safe.Unzip(packed)
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
	limits := &torchfile.PickleLimits{Bytes: mostSnapshotBytes, Values: mostSnapshotValues}
	switch {
	case start[0] == 0x80 && pass != nil:
		return torchfile.DecodePickleItems(r, limits, tracesKey, pass)
	case start[0] == 0x80:
		return torchfile.DecodePickle(r, limits)
	}
	j := &jsonReader{d: json.NewDecoder(io.LimitReader(r, mostSnapshotBytes)), pass: pass}
	j.d.UseNumber()
	v, err := j.value(0)
	if j.mistake != nil {
		return nil, j.mistake
	}
	if safe.EndsEarly(err) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("neither a pickle nor JSON of at most %d bytes: at byte %d: %w", mostSnapshotBytes, j.d.InputOffset(), err)
	}
	return v, nil
}

// A jsonReader reads JSON into the values of package torchfile.
type jsonReader struct {
	d      *json.Decoder
	values int
	memory int64 // bytes that they take

	pass    func(device int, entry any) error // or nil
	mistake error                             // in valid JSON
}

// Values take at most memorySlack bytes of memory and memoryOfByte bytes for each byte of the file. A list of digits or of
// empty lists would take 30 times its size. Values of a snapshot have keys, and take 4 times their size.
const (
	memorySlack  = 32 << 20
	memoryOfByte = 16
	valueBytes   = 64 // in a list or a dictionary, which grow by copies
)

func (j *jsonReader) value(depth int) (any, error) {
	if j.memory += valueBytes; j.memory > memorySlack+memoryOfByte*j.d.InputOffset() {
		return nil, fmt.Errorf("the values so far take %d MiB of memory: want at most %d MiB and %d bytes for each byte of the file", j.memory>>20, memorySlack>>20, memoryOfByte)
	}
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
	l := &torchfile.List{}
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
	d := &torchfile.Dict{}
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
		*d = append(*d, torchfile.DictItem{Key: key, Value: v})
	}
	_, err := j.d.Token()
	return d, err
}

// traces reads the traces of all devices and passes their entries on.
func (j *jsonReader) traces(depth int) (any, error) {
	return j.each(depth, func(device int) error {
		entries, err := j.each(depth+1, func(int) error {
			before, memory := j.values, j.memory
			entry, err := j.value(depth + 2)
			if err != nil {
				return err
			}
			j.values, j.memory = before, memory
			return j.pass(device, entry)
		})
		if _, ok := entries.(*torchfile.List); err == nil && !ok {
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
	return &torchfile.List{}, err
}

// snapshotOf converts the values of a pickle.
func snapshotOf(v any) (*Snapshot, error) {
	r := newSnapshotReader()
	s := readFields[Snapshot](r, "the snapshot", v)
	return &s, r.err
}

// A snapshotReader converts the values of a pickle and keeps the first error. A list
// that occurs several times is converted once.
type snapshotReader struct {
	err     error
	frames  map[*torchfile.List][]Frame
	blocks  map[*torchfile.List][]Block
	entries map[*torchfile.List][]TraceEntry
}

func newSnapshotReader() *snapshotReader {
	return &snapshotReader{
		frames: map[*torchfile.List][]Frame{}, blocks: map[*torchfile.List][]Block{}, entries: map[*torchfile.List][]TraceEntry{},
	}
}

func (r *snapshotReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

// listOf converts each item of a list, unless the list was converted before.
func listOf[T any](r *snapshotReader, l *torchfile.List, what string, known map[*torchfile.List][]T, item func(string, any) T) []T {
	if l == nil || r.err != nil {
		return nil
	}
	if list, ok := known[l]; ok {
		return list
	}
	list := make([]T, 0, len(*l))
	for i, v := range *l {
		list = append(list, item(what, v))
		if r.err != nil {
			r.err = fmt.Errorf("%s %d: %w", what, i, r.err)
			return nil
		}
	}
	if known != nil {
		known[l] = list
	}
	return list
}

// readFields reads the fields of a struct from a dictionary.
func readFields[T any](r *snapshotReader, what string, v any) (x T) {
	d := r.dict(what, v)
	to := reflect.ValueOf(&x).Elem()
	for _, f := range snapshotFields[to.Type()] {
		switch p := to.Field(f.index).Addr().Interface().(type) {
		case *uint64:
			*p = d.uint(f.key, f.always)
		case *int:
			*p = int(d.int(f.key))
		case *int64:
			*p = d.int(f.key)
		case *float64:
			*p = d.float(f.key)
		case *bool:
			*p = d.bool(f.key)
		case *string:
			*p = d.text(f.key)
		case *[2]uint64:
			*p = d.pair(f.key)
		case *Stack:
			*p = listOf(r, d.list(f.key, f.always), "frame", r.frames, r.frame)
		case *[]Block:
			*p = listOf(r, d.list(f.key, f.always), "block", r.blocks, r.block)
		case *[]Segment:
			*p = listOf(r, d.list(f.key, f.always), "segment", nil, r.segment)
		case *[][]TraceEntry:
			*p = listOf(r, d.list(f.key, f.always), "trace", nil, r.trace)
		case *SnapshotSettings:
			if v, ok := d.get(f.key); ok {
				*p = readFields[SnapshotSettings](r, "the settings", v)
			}
		case *divisions:
			if v, ok := d.get(f.key); ok {
				sizes := r.dict(f.key, v)
				for i := range p {
					p[i] = sizes.uint(strconv.Itoa(1<<i), false)
				}
			}
		}
	}
	return x
}

func (r *snapshotReader) segment(what string, v any) Segment {
	g := readFields[Segment](r, what, v)
	g.place()
	return g
}

// place assigns addresses to blocks without one, as in files of older torch. A list of
// blocks that several segments share keeps the addresses of the first.
func (g *Segment) place() {
	at := g.Address
	for i := range g.Blocks {
		if b := &g.Blocks[i]; b.Address == 0 {
			b.Address = at
		}
		at += g.Blocks[i].Size
	}
}

func (r *snapshotReader) block(what string, v any) Block { return readFields[Block](r, what, v) }

func (r *snapshotReader) frame(what string, v any) Frame { return readFields[Frame](r, what, v) }

func (r *snapshotReader) entry(what string, v any) TraceEntry {
	return readFields[TraceEntry](r, what, v)
}

func (r *snapshotReader) trace(_ string, v any) []TraceEntry {
	l, ok := v.(*torchfile.List)
	if !ok {
		r.fail("it is %s: want a list", describe(v))
	}
	return listOf(r, l, "entry", r.entries, r.entry)
}

// A snapshotDict reads typed values from a dictionary.
type snapshotDict struct {
	r    *snapshotReader
	what string
	dict torchfile.Dict
}

func (r *snapshotReader) dict(what string, v any) snapshotDict {
	d, ok := v.(*torchfile.Dict)
	if !ok {
		r.fail("%s is %s: want a dictionary", what, describe(v))
		d = &torchfile.Dict{}
	}
	return snapshotDict{r, what, *d}
}

// get returns the value of key, unless it is missing or None.
func (d snapshotDict) get(key string) (any, bool) {
	v, ok := d.dict.Get(key)
	return v, ok && v != nil
}

// mistake reports a value that is missing or has the wrong type.
func (d snapshotDict) mistake(key string, v any, want string) {
	d.r.fail("%s of %s is %v: want %s", strconv.Quote(key), d.what, describe(v), want)
}

// describe formats a value for an error.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "missing"
	case *torchfile.List:
		return "a list"
	case *torchfile.Dict:
		return "a dictionary"
	case torchfile.Tuple:
		return "a tuple"
	case string:
		return strconv.Quote(v[:min(len(v), 40)])
	}
	return fmt.Sprint(v)
}

func (d snapshotDict) uint(key string, needed bool) uint64 {
	v, ok := d.get(key)
	switch n := v.(type) {
	case int64:
		if n >= 0 {
			return uint64(n)
		}
	case uint64:
		return n
	}
	if ok || needed {
		d.mistake(key, v, "a whole number from 0 on")
	}
	return 0
}

func (d snapshotDict) int(key string) int64 {
	v, ok := d.get(key)
	if n, whole := v.(int64); whole {
		return n
	}
	if ok {
		d.mistake(key, v, "a whole number")
	}
	return 0
}

func (d snapshotDict) float(key string) float64 {
	v, ok := d.get(key)
	switch x := v.(type) {
	case float64:
		return x
	case int64:
		return float64(x)
	}
	if ok {
		d.mistake(key, v, "a number")
	}
	return 0
}

func (d snapshotDict) bool(key string) bool {
	v, ok := d.get(key)
	b, isBool := v.(bool)
	if ok && !isBool {
		d.mistake(key, v, "true or false")
	}
	return b
}

func (d snapshotDict) text(key string) string {
	v, ok := d.get(key)
	s, isText := v.(string)
	if ok && !isText {
		d.mistake(key, v, "a text")
	}
	return s
}

func (d snapshotDict) list(key string, needed bool) *torchfile.List {
	v, ok := d.get(key)
	l, isList := v.(*torchfile.List)
	if (ok || needed) && !isList {
		d.mistake(key, v, "a list")
	}
	return l
}

// pair reads two numbers, such as those that identify a pool.
func (d snapshotDict) pair(key string) (id [2]uint64) {
	v, ok := d.get(key)
	var pair []any
	switch v := v.(type) {
	case torchfile.Tuple:
		pair = v
	case *torchfile.List: // from JSON
		pair = *v
	}
	if ok && len(pair) != 2 {
		d.mistake(key, v, "two numbers")
		return id
	}
	for i, v := range pair {
		n, whole := v.(int64)
		if !whole || n < 0 {
			d.mistake(key, v, "two numbers")
		}
		id[i] = uint64(n)
	}
	return id
}
