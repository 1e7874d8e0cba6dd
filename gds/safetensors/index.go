package safetensors

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// An Index maps the tensors of a checkpoint to its files. It is stored as
// model.safetensors.index.json in the same directory.
type Index struct {
	WeightMap map[string]string // tensor name to file name
	Metadata  json.RawMessage   // the JSON object "metadata", or nil
}

// Files returns the names of the files, sorted and without duplicates.
func (x *Index) Files() []string {
	files := map[string]bool{}
	for _, f := range x.WeightMap {
		files[f] = true
	}
	return slices.Sorted(maps.Keys(files))
}

// TotalSize returns the total size of all tensors in bytes according to the
// metadata, which is not checked.
func (x *Index) TotalSize() (int64, bool) {
	var m struct {
		TotalSize *float64 `json:"total_size"` // some writers write a float
	}
	if json.Unmarshal(x.Metadata, &m) != nil || m.TotalSize == nil || *m.TotalSize < 0 || *m.TotalSize > 1<<53 || *m.TotalSize != math.Trunc(*m.TotalSize) {
		return 0, false
	}
	return int64(*m.TotalSize), true
}

// MarshalJSON returns the index as JSON, and fails if ReadIndex would reject
// the result.
func (x *Index) MarshalJSON() ([]byte, error) {
	for name, file := range x.WeightMap {
		if !utf8.ValidString(name) || !utf8.ValidString(file) {
			return nil, misfit(file, name, "has a name or a file name that is not valid UTF-8")
		}
	}
	out := struct {
		Metadata  json.RawMessage   `json:"metadata,omitempty"`
		WeightMap map[string]string `json:"weight_map"`
	}{x.Metadata, x.WeightMap}
	if out.WeightMap == nil {
		out.WeightMap = map[string]string{}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(out); err != nil {
		return nil, fmt.Errorf("safetensors: write an index: %w", err)
	}
	if _, err := ReadIndex(bytes.NewReader(b.Bytes()), int64(b.Len())); err != nil {
		return nil, fmt.Errorf("safetensors: write an invalid index: %w", err)
	}
	return b.Bytes(), nil
}

// Write writes the index with indentation, in the format of transformers.
func (x *Index) Write(w io.Writer) error {
	text, err := x.MarshalJSON()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return err
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("safetensors: write an index: %w", err)
	}
	return nil
}

// Check compares the index with the headers of the files, by file name. It returns an
// error if a file has no header, if a tensor is not in its file, or if two files have a
// tensor with the same name.
//
// A tensor that is missing from the index is not an error. transformers reads whole
// files and finds it; readers that use the index do not.
func (x *Index) Check(headers map[string]*Header) error {
	files := x.Files()
	owner := map[string]string{}
	for _, f := range files {
		h := headers[f]
		if h == nil {
			return &IndexError{File: f, Reason: "the index contains this file, but its header was not read"}
		}
		for _, t := range h.Tensors {
			if first, ok := owner[t.Name]; ok {
				return misfit(f, t.Name, "is also in %q", first)
			}
			owner[t.Name] = f
		}
	}
	wrong, all := "", true
	for name, f := range x.WeightMap {
		if owner[name] != f && (all || name < wrong) {
			wrong, all = name, false
		}
	}
	switch f := x.WeightMap[wrong]; {
	case all:
		return nil
	case owner[wrong] == "":
		return misfit(f, wrong, "is not in this file, as the index says, nor in any other")
	default:
		return misfit(f, wrong, "is not in this file, as the index says, but in %q", owner[wrong])
	}
}

// local returns the reason why file is not the name of a file next to the index, or "".
func local(file string) string {
	switch {
	case file == "" || file == "." || file == "..":
		return fmt.Sprintf("%q is not the name of a file", file)
	case strings.ContainsAny(file, "/\\\x00"):
		return fmt.Sprintf("%q is not the name of a file next to the index: want a name without separators", short(file))
	case !utf8.ValidString(file):
		return fmt.Sprintf("%q is not valid UTF-8", short(file))
	case strings.ContainsFunc(file, unicode.IsControl): // an error that names the file would have several lines
		return fmt.Sprintf("%q has a line end or another control character: rename the file", short(file))
	}
	return ""
}

// ReadIndex reads an index of size bytes, at most 100,000,000. File names must not
// contain directories, so that an index cannot name other files. Invalid content
// is a *FormatError; other errors come from r. Like the reference implementation,
// it ignores unknown keys besides "weight_map" and "metadata".
func ReadIndex(r io.ReaderAt, size int64) (*Index, error) {
	if size > maxHeader {
		return nil, &FormatError{Reason: fmt.Sprintf("the index has %d bytes: want at most %d", size, maxHeader)}
	}
	text, err := readString(r, 0, max(size, 0))
	if err != nil {
		return nil, err
	}
	p := indexParser{scanner: scanner{text: text}}
	p.object("for the index", p.entry)
	p.end()
	if p.index.WeightMap == nil {
		p.fail(0, "weight_map is missing: the file is not an index of safetensors files")
	}
	if p.err != nil {
		return nil, p.err
	}
	return &p.index, nil
}

type indexParser struct {
	scanner
	index Index
}

func (p *indexParser) entry(at int, key string) {
	switch key {
	case "weight_map":
		if p.index.WeightMap != nil {
			p.fail(at, "weight_map occurs twice")
			return
		}
		p.weights()
	case "metadata":
		if p.index.Metadata != nil {
			p.fail(at, "metadata occurs twice")
			return
		}
		p.peek()
		from := p.at
		p.object("for metadata", func(int, string) { p.skip() })
		p.index.Metadata = json.RawMessage(p.text[from:p.at])
	default:
		p.skip()
	}
}

// weights reads the map, after it has counted the entries, so that the map does
// not grow.
func (p *indexParser) weights() {
	n := p.members("for weight_map")
	p.index.WeightMap = make(map[string]string, n)
	p.object("for weight_map", func(at int, key string) {
		p.name = key
		before := len(p.index.WeightMap)
		p.peek()
		place := p.at
		file := p.string("for the file of a tensor")
		if reason := local(file); reason != "" {
			p.fail(place, "%s", reason)
		}
		if p.index.WeightMap[key] = file; len(p.index.WeightMap) == before {
			p.fail(at, "duplicate name")
		}
		p.name = ""
	})
}

// A Shard is one file of a checkpoint with several files.
type Shard struct {
	File    string
	Tensors []Tensor
}

// Split divides tensors, in their order, into files with at most maxBytes of
// tensors; a larger tensor gets a separate file. The file names are
// name-00001-of-00003.safetensors or, for a single file, name.safetensors,
// where name is usually "model".
func Split(name string, tensors []Tensor, maxBytes int64) ([]Shard, error) {
	if reason := local(name); reason != "" {
		return nil, fmt.Errorf("safetensors: split: %s", reason)
	}
	if maxBytes <= 0 {
		return nil, fmt.Errorf("safetensors: split: files of at most %d bytes: want 1 or more", maxBytes)
	}
	shards, err := divide(tensors, maxBytes)
	if err != nil {
		return nil, err
	}
	if len(shards) == 1 {
		shards[0].File = name + ".safetensors"
		return shards, nil
	}
	for i := range shards {
		shards[i].File = fmt.Sprintf("%s-%05d-of-%05d.safetensors", name, i+1, len(shards))
	}
	return shards, nil
}

// divide is Split without names, and returns one empty file if there are no
// tensors.
func divide(tensors []Tensor, maxBytes int64) ([]Shard, error) {
	shards := make([]Shard, 1)
	room := maxBytes
	for _, t := range tensors {
		n, err := t.size()
		if err != nil {
			return nil, err
		}
		last := &shards[len(shards)-1]
		if n > room && len(last.Tensors) > 0 {
			shards = append(shards, Shard{})
			last, room = &shards[len(shards)-1], maxBytes
		}
		last.Tensors = append(last.Tensors, t)
		room -= n
	}
	return shards, nil
}

// NewIndex returns the index of the shards, with the total size of all tensors as
// "total_size". It fails if a tensor is in two shards.
func NewIndex(shards []Shard) (*Index, error) {
	x := &Index{WeightMap: map[string]string{}}
	total := int64(0)
	for _, s := range shards {
		for _, t := range s.Tensors {
			if first, ok := x.WeightMap[t.Name]; ok {
				return nil, misfit(s.File, t.Name, "is also in %q", first)
			}
			x.WeightMap[t.Name] = s.File
			n, err := t.size()
			if err != nil {
				return nil, err
			}
			total += n
		}
	}
	var err error
	x.Metadata, err = json.Marshal(map[string]int64{"total_size": total})
	return x, err
}
