package timeline_test

import (
	"fmt"
	"log"
	"os"

	"github.com/gochorus/chorus/nvtx"
	"github.com/gochorus/chorus/timeline"
)

// A recording of one step. chorus timeline reads the file.
func ExampleStart() {
	dir, err := os.MkdirTemp("", "timeline")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	t, err := timeline.Start(dir)
	if err != nil {
		log.Fatal(err)
	}
	nvtx.Range("step", func() { /* enqueue the work of the step, and wait for it */ })
	if err := t.Close(); err != nil {
		log.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	fmt.Println(len(files), "file", err)
	// Output: 1 file <nil>
}
