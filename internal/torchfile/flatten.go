package torchfile

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/gochorus/chorus/internal/pickle"
)

// A flattener gives names to the tensors and values in an object: the keys and indices on the
// way to them, with dots between.
type flattener struct {
	file  *File
	taken map[string]bool
	size  int64 // of the pickle, which limits the work
	whole int64 // bytes of the file, which limit the bytes of tensors
	data  int64 // bytes of tensors
	count int64
	bytes int64 // of names
}

// Limits for each byte of the pickle. A value takes at least a byte, but containers may be in
// several places.
const (
	valuesOfByte = 2
	namesOfByte  = 16 // bytes of names
	slack        = 1 << 12
)

// lone is the name of an object that is in no container.
const lone = "tensor"

func (f *flattener) add(name string, v any, depth int) error {
	if f.count++; f.count > slack+valuesOfByte*f.size {
		return fmt.Errorf("it has more than %d values in a pickle of %d bytes", f.count-1, f.size)
	}
	if depth > mostDepth {
		return fmt.Errorf("more than %d containers are in each other", mostDepth)
	}
	switch x := v.(type) {
	case *pickle.Dict:
		for _, item := range *x {
			key, err := keyText(item.Key)
			if err == nil {
				err = f.add(join(name, key, depth), item.Value, depth+1)
			}
			if err != nil {
				return err
			}
		}
		return nil
	case *pickle.List:
		return f.addAll(name, *x, depth)
	case pickle.Tuple:
		return f.addAll(name, x, depth)
	}
	return f.addLeaf(name, v, depth)
}

func (f *flattener) addAll(name string, list []any, depth int) error {
	for i, x := range list {
		if err := f.add(join(name, strconv.Itoa(i), depth), x, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (f *flattener) addLeaf(name string, v any, depth int) error {
	if depth == 0 {
		name = lone
	}
	if f.bytes += int64(len(name)); len(name) > mostName || f.bytes > slack+namesOfByte*f.size {
		return fmt.Errorf("the name %.40q… is longer than %d bytes, or all names together are much longer than the pickle", name, mostName)
	}
	if f.taken[name] {
		return fmt.Errorf("two values have the name %q, with dots between the keys", name)
	}
	f.taken[name] = true
	switch x := v.(type) {
	case *Tensor:
		t := *x
		t.Name = name
		return f.addTensor(t)
	case *storage:
		t := Tensor{Name: name, DType: x.format, Offset: x.at, Strides: []int{1}}
		t.Shape = []int{int(x.bytes) / t.Size()}
		return f.addTensor(t)
	}
	f.file.Values[name] = valueText(v)
	return nil
}

func (f *flattener) addTensor(t Tensor) error {
	f.data += int64(t.Elements() * t.Size())
	if err := CheckBytes(f.data, f.whole); err != nil {
		return fmt.Errorf("tensor %q of shape %v: %w", t.Name, t.Shape, err)
	}
	f.file.Tensors = append(f.file.Tensors, t)
	return nil
}

func join(name, key string, depth int) string {
	if depth == 0 {
		return key
	}
	return name + "." + key
}

func keyText(key any) (string, error) {
	switch k := key.(type) {
	case string:
		return k, nil
	case nil, bool, int64, uint64, float64:
		return valueText(k), nil
	}
	return "", fmt.Errorf("a dictionary has a key of type %T: want a text or a number", key)
}

// valueText returns a plain value as JSON. Numbers that JSON lacks, and types, are texts.
func valueText(v any) string {
	switch x := v.(type) {
	case dtype:
		v = "torch." + x.name
	case global:
		v = string(x)
	case storageType:
		v = x.format.String()
	}
	text, err := json.Marshal(v)
	if err != nil { // NaN, or an infinity
		text, _ = json.Marshal(fmt.Sprint(v))
	}
	return string(text)
}
