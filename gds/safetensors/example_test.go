package safetensors_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/gochorus/chorus/gds/safetensors"
)

// A file is written and read in host memory.
func Example() {
	var file bytes.Buffer
	err := safetensors.Write(&file, map[string]string{"format": "pt"},
		safetensors.Data{Tensor: safetensors.Tensor{Name: "bias", DType: safetensors.U8, Shape: []int{3}}, Raw: []byte{1, 2, 3}},
		safetensors.Data{Tensor: safetensors.Tensor{Name: "scale", DType: safetensors.BF16}, Raw: []byte{0x80, 0x3f}})
	if err != nil {
		log.Fatal(err)
	}
	h, err := safetensors.ReadHeader(bytes.NewReader(file.Bytes()), int64(file.Len()))
	if err != nil {
		log.Fatal(err)
	}
	for _, t := range h.Tensors {
		fmt.Println(t.Name, t.DType, t.Shape, file.Bytes()[t.Begin:t.End])
	}
	// Output:
	// scale BF16 [] [128 63]
	// bias U8 [3] [1 2 3]
}

// A checkpoint in several files has an index beside them.
func ExampleSplit() {
	tensors := []safetensors.Tensor{
		{Name: "layer.0", DType: safetensors.F32, Shape: []int{4, 4}},
		{Name: "layer.1", DType: safetensors.F32, Shape: []int{4, 4}},
		{Name: "head", DType: safetensors.F32, Shape: []int{2, 4}},
	}
	shards, err := safetensors.Split("model", tensors, 100)
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range shards {
		h, start, err := safetensors.NewHeader(s.Tensors, nil)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(s.File, len(start), h.Size)
	}
	index, err := safetensors.NewIndex(shards)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(index.WeightMap["head"], string(index.Metadata))
	// Output:
	// model-00001-of-00002.safetensors 72 136
	// model-00002-of-00002.safetensors 136 232
	// model-00002-of-00002.safetensors {"total_size":160}
}
