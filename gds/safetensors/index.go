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

// An Index says which file has which tensor of a checkpoint in several files: the
// model.safetensors.index.json beside them.
type Index struct {
	WeightMap map[string]string // the file of each tensor, by the tensor's name
	Metadata  json.RawMessage   // the JSON object "metadata", nil when there is none
}

// Files returns the names of the files in their order, each once.
func (x *Index) Files() []string {
	files := map[string]bool{}
	for _, f := range x.WeightMap {
		files[f] = true
	}
	return slices.Sorted(maps.Keys(files))
}

// TotalSize returns what the metadata say that all tensors take together, bytes. It
// is what the writer thought: nothing checks it.
func (x *Index) TotalSize() (int64, bool) {
	var m struct {
		TotalSize *float64 `json:"total_size"` // some writers make it 1.0
	}
	if json.Unmarshal(x.Metadata, &m) != nil || m.TotalSize == nil || *m.TotalSize < 0 || *m.TotalSize > 1<<53 || *m.TotalSize != math.Trunc(*m.TotalSize) {
		return 0, false
	}
	return int64(*m.TotalSize), true
}

// MarshalJSON returns the index as JSON. It is an error when it is not one that
// ReadIndex takes.
func (x *Index) MarshalJSON() ([]byte, error) {
	for name, file := range x.WeightMap {
		if !utf8.ValidString(name) || !utf8.ValidString(file) {
			return nil, misfit(file, name, "has a name that is not UTF-8, or its file has")
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
		return nil, fmt.Errorf("safetensors: write an index that would not be read: %w", err)
	}
	return b.Bytes(), nil
}

// Write writes the index as the file model.safetensors.index.json is written by
// transformers, indented.
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

// Check returns an error when the headers of the files, by the files' names, are
// not what the index says: a file has no header there, a tensor is not in its file,
// or two of the files have a tensor of the same name, so that it depends on the
// reader which is meant.
//
// A tensor that the index does not name is no error. transformers reads whole files
// and finds it; who goes by the index does not.
func (x *Index) Check(headers map[string]*Header) error {
	files := x.Files()
	owner := map[string]string{}
	for _, f := range files {
		h := headers[f]
		if h == nil {
			return &IndexError{File: f, Reason: "the index names this file, which has not been read"}
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
		return misfit(f, wrong, "is not in this file, where the index has it, nor in another")
	default:
		return misfit(f, wrong, "is not in this file, where the index has it, but in %q", owner[wrong])
	}
}

// local returns why file is not the name of a file beside the index.
func local(file string) string {
	switch {
	case file == "" || file == "." || file == "..":
		return fmt.Sprintf("%q is not the name of a file", file)
	case strings.ContainsAny(file, "/\\\x00"):
		return fmt.Sprintf("%q is not the name of a file beside the index: want one without separators", short(file))
	case !utf8.ValidString(file):
		return fmt.Sprintf("%q is not UTF-8", short(file))
	}
	return ""
}
