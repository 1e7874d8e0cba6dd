package memory_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The cost of an allocation that the cache serves, and of its free.
func BenchmarkHit(b *testing.B) {
	d := testgpu.CUDA(b, 1)[0]
	handle.Trace.Store(false) // the stacks of creation that only tests record
	defer handle.Trace.Store(true)
	s, err := stream.New(d, nil)
	require.NoError(b, err)
	defer s.Close()
	for name, hit := range map[string]func() error{
		"raw": func() error {
			p, err := memory.AllocRaw(s, 4096)
			if err != nil {
				return err
			}
			return memory.FreeRaw(d, p)
		},
		"buffer": func() error {
			x, err := memory.Alloc(s, 4096)
			if err != nil {
				return err
			}
			return x.Close()
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := hit(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
