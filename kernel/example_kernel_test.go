package kernel_test

import (
	"fmt"
	"log"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A kernel is launched by its name, with single arguments.
func ExampleCompile() {
	src, _ := scaling()
	onVirtual(func(s *stream.Stream) error {
		m, err := kernel.Compile(s.Device(), src)
		if err != nil {
			return err
		}
		defer m.Close()
		k, err := m.Kernel("scale")
		if err != nil {
			return err
		}
		x, err := memory.MakeFrom(s, []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer x.Close()
		if err := k.Launch(s, kernel.Cover(3), kernel.Ptr(x), kernel.Scalar(float32(3)), kernel.Scalar(int32(3))); err != nil {
			return err
		}
		out := make([]float32, 3)
		err = x.CopyTo(s, out)
		fmt.Println(out)
		return err
	})
	// Output: [3 6 9]
}

func ExampleCover() {
	g := kernel.Cover(1000)
	fmt.Println(g.Blocks[0], "blocks of", g.Threads[0], "threads")
	// Output: 4 blocks of 256 threads
}

func ExamplePromote() {
	t, err := kernel.Promote(memory.Int32, memory.Float16)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(t)
	// Output: float16
}
