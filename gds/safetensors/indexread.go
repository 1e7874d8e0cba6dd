package safetensors

import (
	"encoding/json"
	"fmt"
	"io"
)

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

// weights reads the map. It counts the entries first, so that the map does not grow.
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
