package nvtx_test

import (
	"fmt"

	"github.com/gochorus/chorus/nvtx"
)

// The profiler shows the function as a range, with a mark in it.
func ExampleRange() {
	nvtx.Range("backward", func() {
		nvtx.Mark("the last layer is done")
		fmt.Println("backward")
	})
	// Output: backward
}

func ExampleAttached() {
	attached, err := nvtx.Attached()
	fmt.Println(attached, err)
	// Output: false <nil>
}
