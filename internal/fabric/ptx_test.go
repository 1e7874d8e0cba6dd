package fabric

import (
	"testing"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The PTX belongs to the sources and has every module that there is.
func TestPTX(t *testing.T) {
	t.Run("fabric", func(t *testing.T) {
		testgpu.CheckPTX(t, "fabric.ptx.zst", packed, append(reducers(formats[:], source), cudacc.Source{Name: "move", CUDA: source}))
	})
	t.Run("fold", func(t *testing.T) {
		testgpu.CheckPTX(t, "fold.ptx.zst", packedFold, reducers(foldFormats, foldSource))
	})
}

// reducers returns the modules of a source for all types and reductions.
func reducers(formats []format, source string) (list []cudacc.Source) {
	for i := range formats {
		for op := range templates {
			list = append(list, cudacc.Source{Name: templates[op] + "/" + formats[i].c, CUDA: source, Options: macros(&formats[i], collective.Reduction(op))})
		}
	}
	return list
}
