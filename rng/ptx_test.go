package rng

import (
	"testing"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The PTX belongs to rng.cu and has every kernel that there is; the trials have
// one of each.
func TestPTX(t *testing.T) {
	var sources []cudacc.Source
	seen := map[string]bool{}
	for _, tr := range trials() {
		name := templates[tr.d] + "/" + tr.f.Short
		if !seen[name] {
			seen[name] = true
			sources = append(sources, cudacc.Source{Name: name, CUDA: source, Options: macros(tr.d, tr.f)})
		}
	}
	testgpu.CheckPTX(t, "rng.ptx.zst", packed, sources)
}
