package main

import (
	_ "embed"
	"fmt"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed attention.cu
var attentionSource string

type bfloats = memory.Slice[memory.BFloat16Bits]

type attentionArgs struct {
	QKV, Out      bfloats
	Tokens, Heads int32
}

// An attention has the kernel of one device.
type attention struct {
	module *kernel.Module
	launch *kernel.Func[attentionArgs]
}

func newAttention(dev *device.Device) (*attention, error) {
	src := &kernel.Source{Name: "attention.cu", CUDA: attentionSource, Options: []string{fmt.Sprint("--define-macro=HEAD=", headWidth)}}
	a := &attention{launch: kernel.Define(src, "attention", standInAttention)}
	var err error
	a.module, err = kernel.Compile(dev, src)
	return a, err
}

// enqueue computes the attention of so many heads on s.
func (a *attention) enqueue(s *stream.Stream, qkv, out bfloats, heads int) error {
	return a.launch.Launch(s, kernel.Cover(tokens*heads), attentionArgs{qkv, out, tokens, int32(heads)})
}

// standInAttention is the kernel on virtual devices.
func standInAttention(c *kernel.Call, a attentionArgs) {
	qkv, out, heads := kernel.Data(c, a.QKV), kernel.Data(c, a.Out), int(a.Heads)
	width := heads * headWidth
	for token := range int(a.Tokens) {
		for head := range heads {
			q := qkv[token*3*width+head*headWidth:][:headWidth]
			scores, total, largest := make([]float64, token+1), 0.0, math.Inf(-1)
			for t := range scores {
				k := qkv[t*3*width+width+head*headWidth:][:headWidth]
				for d := range q {
					scores[t] += float64(q[d].Float32()) * float64(k[d].Float32())
				}
				scores[t] /= math.Sqrt(headWidth)
				largest = max(largest, scores[t])
			}
			sum := make([]float64, headWidth)
			for t, x := range scores {
				weight := math.Exp(x - largest)
				total += weight
				for d, v := range qkv[t*3*width+2*width+head*headWidth:][:headWidth] {
					sum[d] += weight * float64(v.Float32())
				}
			}
			for d, v := range sum {
				out[token*width+head*headWidth+d] = memory.BFloat16Of(float32(v / total))
			}
		}
	}
}
