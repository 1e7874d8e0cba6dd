package fabric

import (
	"testing"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/internal/ptxtest"
)

// The PTX belongs to the source and has every module that there is.
func TestPTX(t *testing.T) {
	sources := []ptx.Source{{Name: "move", CUDA: source}}
	for i := range formats {
		for op := range templates {
			sources = append(sources, ptx.Source{Name: templates[op] + "/" + formats[i].c, CUDA: source, Options: macros(&formats[i], flight.Reduction(op))})
		}
	}
	ptxtest.Check(t, "fabric.ptx.zst", packed, sources)
}
