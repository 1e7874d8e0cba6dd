package torchfile

import (
	"bytes"
	"io"
	"iter"
	"testing"
)

func entries(n int) iter.Seq[any] {
	return func(yield func(any) bool) {
		for i := range n {
			d := Dict{{"action", "alloc"}, {"addr", 1<<46 + i*512}, {"size", 512 * i}, {"stream", 0}, {"time_us", 1795191510132116 + i}}
			if !yield(d) {
				return
			}
		}
	}
}

// BenchmarkEncode and BenchmarkDecode are of a trace of a million entries.
func BenchmarkEncode(b *testing.B) {
	for b.Loop() {
		if err := EncodePickle(io.Discard, entries(1e6)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	var p bytes.Buffer
	if err := EncodePickle(&p, entries(1e6)); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(p.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodePickle(bytes.NewReader(p.Bytes()), nil); err != nil {
			b.Fatal(err)
		}
	}
}
