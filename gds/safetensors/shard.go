package safetensors

import (
	"encoding/json"
	"fmt"
)

// A Shard is one file of a checkpoint with several files.
type Shard struct {
	File    string
	Tensors []Tensor
}

// Split divides tensors, in their order, into files with at most maxBytes of
// tensors; a larger tensor gets a separate file. The file names are
// name-00001-of-00003.safetensors or, for a single file, name.safetensors. The
// usual name is "model".
func Split(name string, tensors []Tensor, maxBytes int64) ([]Shard, error) {
	if reason := local(name); reason != "" {
		return nil, fmt.Errorf("safetensors: split: %s", reason)
	}
	if maxBytes <= 0 {
		return nil, fmt.Errorf("safetensors: split: files of at most %d bytes: want 1 or more", maxBytes)
	}
	shards, err := divide(tensors, maxBytes)
	if err != nil {
		return nil, err
	}
	if len(shards) == 1 {
		shards[0].File = name + ".safetensors"
		return shards, nil
	}
	for i := range shards {
		shards[i].File = fmt.Sprintf("%s-%05d-of-%05d.safetensors", name, i+1, len(shards))
	}
	return shards, nil
}

// divide is Split without names. Without tensors it returns one empty file.
func divide(tensors []Tensor, maxBytes int64) ([]Shard, error) {
	shards := make([]Shard, 1)
	room := maxBytes
	for _, t := range tensors {
		n, err := t.size()
		if err != nil {
			return nil, err
		}
		last := &shards[len(shards)-1]
		if n > room && len(last.Tensors) > 0 {
			shards = append(shards, Shard{})
			last, room = &shards[len(shards)-1], maxBytes
		}
		last.Tensors = append(last.Tensors, t)
		room -= n
	}
	return shards, nil
}

// NewIndex returns the index of the shards, with the total size of all tensors as
// "total_size". It fails if a tensor is in two shards.
func NewIndex(shards []Shard) (*Index, error) {
	x := &Index{WeightMap: map[string]string{}}
	total := int64(0)
	for _, s := range shards {
		for _, t := range s.Tensors {
			if first, ok := x.WeightMap[t.Name]; ok {
				return nil, misfit(s.File, t.Name, "is also in %q", first)
			}
			x.WeightMap[t.Name] = s.File
			n, err := t.size()
			if err != nil {
				return nil, err
			}
			total += n
		}
	}
	var err error
	x.Metadata, err = json.Marshal(map[string]int64{"total_size": total})
	return x, err
}
