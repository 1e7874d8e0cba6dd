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
// metadata. The value is not checked.
func (x *Index) TotalSize() (int64, bool) {
	var m struct {
		TotalSize *float64 `json:"total_size"` // some writers write a float
	}
	if json.Unmarshal(x.Metadata, &m) != nil || m.TotalSize == nil || *m.TotalSize < 0 || *m.TotalSize > 1<<53 || *m.TotalSize != math.Trunc(*m.TotalSize) {
		return 0, false
	}
	return int64(*m.TotalSize), true
}

// MarshalJSON returns the index as JSON. It fails if ReadIndex would reject the
// result.
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
	}
	return ""
}
