package nvtx_test

import (
	"fmt"

	"github.com/gochorus/chorus/nvtx"
)

// A range may begin and end anywhere; without a profiler it costs next to
// nothing.
func ExampleStart() {
	r := nvtx.Start("step")
	defer r.End()
	nvtx.Range("forward", func() { fmt.Println("forward") })
	nvtx.Mark("loss computed")
	// Output: forward
}
