package checkpoint

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/gds/safetensors"
)

// assignWriters decides which rank writes which part. by has the parts of each rank. A part that
// several ranks have goes to the one that writes the fewest bytes so far, the largest parts
// first. All ranks compute the same. Together the parts must be whole tensors.
func assignWriters(by [][]partInfo) (*manifest, error) {
	m := &manifest{Version: manifestVersion, Ranks: len(by), Block: blockBytes}
	names := map[string]int{}
	var offers []offer
	for rank, parts := range by {
		for _, p := range parts {
			i, ok := names[p.Name]
			if !ok {
				i = len(m.Tensors)
				names[p.Name] = i
				m.Tensors = append(m.Tensors, savedTensor{Name: p.Name, DType: p.Format.String(), Shape: p.Shape, Rows: 1, Width: p.Box.Rows * p.Box.Width})
			}
			t := &m.Tensors[i]
			if t.DType != p.Format.String() || !slices.Equal(t.Shape, p.Shape) {
				return nil, fmt.Errorf("tensor %q is %s %v on rank %d, and %s %v on another: want the same", p.Name, p.Format, p.Shape, rank, t.DType, t.Shape)
			}
			if !p.whole() {
				t.Rows, t.Width = p.Box.Rows, p.Box.Width
			}
			offers = append(offers, offer{p, rank, i})
		}
	}
	if err := m.assign(offers); err != nil {
		return nil, err
	}
	for i := range m.Tensors {
		if err := m.Tensors[i].check(); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(m.Tensors, func(a, b savedTensor) int { return cmp.Compare(a.Name, b.Name) })
	return m, nil
}

// An offer is a part that a rank could write.
type offer struct {
	partInfo
	rank, tensor int
}

// assign chooses a rank for each part.
func (m *manifest) assign(offers []offer) error {
	slices.SortStableFunc(offers, func(a, b offer) int {
		return cmp.Or(cmp.Compare(b.bytes(), a.bytes()), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Box.Start, b.Box.Start), cmp.Compare(a.Box.Len, b.Box.Len))
	})
	load := make([]int64, m.Ranks)
	for i := 0; i < len(offers); {
		first, best := offers[i], offers[i].rank
		for ; i < len(offers) && offers[i].tensor == first.tensor && offers[i].Box == first.Box; i++ {
			if r := offers[i].rank; load[r] < load[best] {
				best = r
			}
		}
		t := &m.Tensors[first.tensor]
		if first.Box.Len == 0 && product(t.Shape) > 0 {
			continue // a rank without elements
		}
		p := savedPart{Key: first.Name, Start: first.Box.Start, Len: first.Box.Len, rank: best, stored: first.Stored, info: first.partInfo}
		if first.whole() {
			p.Len, p.stored = t.Width, t.Shape
		} else {
			if t.Rows != first.Box.Rows || t.Width != first.Box.Width {
				return fmt.Errorf("tensor %q is cut along different dimensions by different ranks: want one", first.Name)
			}
			p.Key = fmt.Sprintf("%s@%d", first.Name, first.Box.Start)
		}
		load[best] += first.bytes()
		t.Parts = append(t.Parts, p)
	}
	return nil
}

// lay gives each writing rank its file, and returns the headers by file.
func (m *manifest) lay() (headers []*safetensors.Header, starts [][]byte, err error) {
	at := make([]int, m.Ranks)
	lists := make([][]safetensors.Tensor, m.Ranks)
	keys := map[string]bool{}
	for i := range m.Tensors {
		for _, p := range m.Tensors[i].Parts {
			if keys[p.Key] {
				return nil, nil, fmt.Errorf("tensor %q would be in the files twice: rename it", p.Key)
			}
			keys[p.Key] = true
			lists[p.rank] = append(lists[p.rank], safetensors.Tensor{Name: p.Key, DType: p.info.Format, Shape: p.stored})
		}
	}
	for rank, list := range lists {
		if len(list) == 0 {
			continue
		}
		h, start, err := safetensors.NewHeader(list, map[string]string{"format": "pt"})
		if err != nil {
			return nil, nil, err
		}
		at[rank] = len(m.Files)
		m.Files = append(m.Files, savedFile{Name: fmt.Sprintf("rank-%05d.safetensors", rank), Bytes: h.Size, rank: rank})
		headers, starts = append(headers, h), append(starts, start)
	}
	for i := range m.Tensors {
		for j := range m.Tensors[i].Parts {
			m.Tensors[i].Parts[j].File = at[m.Tensors[i].Parts[j].rank]
		}
	}
	return headers, starts, nil
}
