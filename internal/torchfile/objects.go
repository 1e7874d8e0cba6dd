package torchfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/safe"
)

// A global is a class or a function of Python: its module and its name.
type global string

// A torchType is a type of torch, as a value.
type torchType struct {
	name   string
	format safetensors.DType // Invalid if the format has no such type
}

// A storageType is a class of storages.
type storageType struct{ format safetensors.DType }

// A storage is the bytes of an entry.
type storage struct {
	at, bytes int64
	format    safetensors.DType // of its elements
}

func (*storage) memory() int { return 2 * containerBytes }

// objects interprets the classes and calls in files of torch.save.
type objects struct {
	archive *archive
	prefix  string // of the names of storages
	known   map[string]*storage
}

// calls are the functions and classes whose calls are known.
var calls = map[global]func(o *objects, args Tuple) (any, error){
	"collections.OrderedDict":                    orderedDict,
	"torch._utils._rebuild_tensor":               (*objects).tensor,
	"torch._utils._rebuild_tensor_v2":            (*objects).tensor,
	"torch._utils._rebuild_tensor_v3":            (*objects).tensor,
	"torch._utils._rebuild_parameter":            first,
	"torch._utils._rebuild_parameter_with_state": first,
	"torch.Size":                      first,
	"torch.device":                    device,
	"torch.serialization._get_layout": first,
	"builtins.set":                    first,
	"__builtin__.set":                 first,
	"_codecs.encode":                  first,
}

// Global returns the value of a name that this package knows.
func (o *objects) Global(module, name string) (any, error) {
	full := global(module + "." + name)
	if format, ok := storages[name]; ok && (module == "torch" || module == "torch.storage" || module == "torch.cuda") {
		return storageType{format}, nil
	}
	if format, ok := dtypes[name]; ok && module == "torch" {
		return torchType{name, format}, nil
	}
	if calls[full] != nil || full == "torch._tensor._rebuild_from_type_v2" || full == "torch.nn.parameter.Parameter" || full == "torch.Tensor" {
		return full, nil
	}
	return nil, fmt.Errorf("it has the global %s: only tensors of dense types, dictionaries, lists, numbers and texts are read, because other classes and functions would run code", safe.Text(string(full)))
}

// Call returns the result of a function that this package knows.
func (o *objects) Call(fn any, args Tuple) (any, error) {
	name, ok := fn.(global)
	if !ok {
		return nil, fmt.Errorf("a call of a %T: want a function or a class", fn)
	}
	if name == "torch._tensor._rebuild_from_type_v2" { // of a subclass of Tensor: function, class, arguments, state
		if len(args) == 4 {
			if inner, ok := args[2].(Tuple); ok && args[0] != any(name) {
				return o.Call(args[0], inner)
			}
		}
		return nil, fmt.Errorf("%s has unknown arguments", name)
	}
	call := calls[name]
	if call == nil {
		return nil, fmt.Errorf("a call of %s", name)
	}
	v, err := call(o, args)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return v, nil
}

// Build ignores the state: a dictionary's state is the version of its modules.
func (o *objects) Build(object, _ any) error {
	switch object.(type) {
	case *Dict, *Tensor:
		return nil
	}
	return fmt.Errorf("it sets the state of a %T: want a dictionary or a tensor", object)
}

// Persistent returns the storage of an identifier: the word storage, the class, the key, the
// device, and the number of elements.
func (o *objects) Persistent(id any) (any, error) {
	t, ok := id.(Tuple)
	if !ok || len(t) < 5 || t[0] != "storage" {
		return nil, errors.New("a persistent identifier is not a storage")
	}
	class, isClass := t[1].(storageType)
	key, isKey := t[2].(string)
	n, isCount := t[4].(int64)
	if !isClass || !isKey || !isCount || n < 0 {
		return nil, errors.New("a storage has no class, key or number of elements")
	}
	s, err := o.storage(key)
	if err != nil {
		return nil, err
	}
	size := int64(class.format.Bits() / 8)
	if n > s.bytes/size {
		return nil, fmt.Errorf("storage %q has %d bytes: want %d elements of %s", key, s.bytes, n, class.format)
	}
	return &storage{s.at, n * size, class.format}, nil
}

// storage returns the place of the storage with a key.
func (o *objects) storage(key string) (*storage, error) {
	if s := o.known[key]; s != nil {
		return s, nil
	}
	e := o.archive.entries[o.prefix+key]
	if e == nil {
		return nil, fmt.Errorf("the archive lacks the entry %q of a storage", o.prefix+key)
	}
	at, err := o.archive.locate(e)
	if err != nil {
		return nil, err
	}
	s := &storage{at: at, bytes: e.size}
	o.known[key] = s
	return s, nil
}

// tensor returns the tensor of torch's rebuild functions. Their arguments are
// the storage, the offset in it, the shape, the strides, whether the tensor
// needs a gradient, and its hooks. The type follows if the storage has none,
// and flags of the elements may follow.
func (o *objects) tensor(args Tuple) (any, error) {
	if len(args) < 4 {
		return nil, fmt.Errorf("%d arguments: want 4 or more", len(args))
	}
	s, isStorage := args[0].(*storage)
	offset, isOffset := args[1].(int64)
	shape, isShape := ints(args[2])
	strides, isStrides := ints(args[3])
	if !isStorage || !isOffset || !isShape || !isStrides || offset < 0 || len(shape) != len(strides) {
		return nil, errors.New("it has no storage, offset, shape or strides")
	}
	t := &Tensor{DType: s.format, Shape: shape, Strides: strides}
	for _, extra := range args[min(6, len(args)):] {
		if err := t.refine(extra); err != nil {
			return nil, err
		}
	}
	n, err := span(shape, strides)
	if err != nil {
		return nil, err
	}
	have := s.bytes / int64(t.Size())
	if n > 0 && (offset > have || int64(n) > have-offset) {
		return nil, fmt.Errorf("a tensor of shape %v with strides %v from element %d: its storage has %d elements", shape, strides, offset, have)
	}
	if n == 0 {
		offset = 0
	}
	t.Offset = s.at + offset*int64(t.Size())
	return t, nil
}

// refine interprets an additional argument: a type, or flags.
func (t *Tensor) refine(extra any) error {
	switch x := extra.(type) {
	case torchType:
		if t.DType = x.format; t.DType.Bits() < 8 {
			return fmt.Errorf("a tensor of type torch.%s: safetensors files have no such type", x.name)
		}
	case *Dict:
		for _, item := range *x {
			if item.Value != false {
				return errors.New("a tensor has a flag, such as conj, which is lazy arithmetic: call resolve_conj() and resolve_neg() before torch.save")
			}
		}
	}
	return nil
}

// ints returns the numbers of a tuple.
func ints(v any) ([]int, bool) {
	t, ok := v.(Tuple)
	if !ok || len(t) > mostDepth {
		return nil, false
	}
	list := make([]int, len(t))
	for i, x := range t {
		n, ok := x.(int64)
		if !ok {
			return nil, false
		}
		list[i] = int(n)
	}
	return list, true
}

// orderedDict returns an empty dictionary; the writer adds the entries later.
func orderedDict(_ *objects, args Tuple) (any, error) {
	if len(args) > 0 {
		return nil, errors.New("it has arguments")
	}
	return &Dict{}, nil
}

// first returns the first argument.
func first(_ *objects, args Tuple) (any, error) {
	if len(args) == 0 {
		return nil, errors.New("it has no argument")
	}
	return args[0], nil
}

// device returns the name of a device.
func device(_ *objects, args Tuple) (any, error) {
	if len(args) > 0 {
		name, ok := args[0].(string)
		if ok && len(args) == 1 {
			return name, nil
		}
		if index, is := args[len(args)-1].(int64); ok && is {
			return fmt.Sprintf("%s:%d", name, index), nil
		}
	}
	return nil, errors.New("it has no name")
}

// A flattener gives names to the tensors and values in an object: the keys and indices on the
// way to them, with dots between.
type flattener struct {
	file    *File
	tensors map[string]bool // their names
	size    int64           // of the pickle, which limits the work
	whole   int64           // bytes of the file, which limit the bytes of tensors
	data    int64           // bytes of tensors
	count   int64
	bytes   int64 // of names, also of containers
	memory  int64 // bytes of the names and values that the file has
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
	if f.bytes += int64(len(name)); len(name) > mostName || f.bytes > slack+namesOfByte*f.size {
		return fmt.Errorf("the name %.40q… is longer than %d bytes, or all names together are much longer than the pickle", name, mostName)
	}
	if depth > mostDepth {
		return fmt.Errorf("more than %d containers are in each other", mostDepth)
	}
	switch x := v.(type) {
	case *Dict:
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
	case *List:
		return f.addAll(name, *x, depth)
	case Tuple:
		return f.addAll(name, x, depth)
	}
	return f.addLeaf(name, v, depth)
}

// longList is the length from which a list of numbers is one value, a JSON array: a name for each number takes much more memory than
// the file.
const longList = 1 << 16

func (f *flattener) addAll(name string, list []any, depth int) error {
	if len(list) >= longList && !slices.ContainsFunc(list, func(v any) bool { return !isNumber(v) }) {
		return f.addLeaf(name, list, depth)
	}
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
	if _, taken := f.file.Values[name]; taken || f.tensors[name] {
		return fmt.Errorf("two values have the name %q, with dots between the keys", name)
	}
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
	text := valueText(v)
	if err := f.take(len(name) + len(text) + entryOfValue); err != nil {
		return err
	}
	f.file.Values[name] = text
	return nil
}

// entryOfValue is how many bytes an entry of a map of texts takes, on average.
const entryOfValue = 4 * valueBytes

// take counts bytes of memory.
func (f *flattener) take(memory int) error {
	if f.memory += int64(memory); f.memory > memorySlack+memoryOfByte*f.size {
		return fmt.Errorf("its names and values take more than %d MiB of memory, and its pickle has only %d bytes: save long lists of numbers as tensors", f.memory>>20, f.size)
	}
	return nil
}

func (f *flattener) addTensor(t Tensor) error {
	f.data += int64(t.Elements() * t.Size())
	if err := CheckBytes(f.data, f.whole); err != nil {
		return fmt.Errorf("tensor %q of shape %v: %w", t.Name, t.Shape, err)
	}
	if err := f.take(len(t.Name) + entryOfValue + t.memory()); err != nil {
		return err
	}
	f.tensors[t.Name] = true
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

func isNumber(v any) bool {
	switch v.(type) {
	case int64, uint64, float64, bool:
		return true
	}
	return false
}

// valueText returns a plain value, or a list of numbers, as JSON. Types, and numbers that JSON lacks,
// become texts.
func valueText(v any) string {
	switch x := v.(type) {
	case torchType:
		v = "torch." + x.name
	case global:
		v = string(x)
	case storageType:
		v = x.format.String()
	}
	text, err := json.Marshal(v)
	list, isList := v.([]any)
	switch {
	case err == nil:
	case isList:
		text = append(text, '[')
		for i, number := range list {
			if i > 0 {
				text = append(text, ',')
			}
			text = append(text, valueText(number)...)
		}
		text = append(text, ']')
	default: // NaN, or an infinity
		text, _ = json.Marshal(fmt.Sprint(v))
	}
	return string(text)
}

// A Tensor describes a tensor in a file of torch.save. Several tensors may share bytes.
type Tensor struct {
	Name    string
	DType   safetensors.DType
	Shape   []int
	Strides []int // in elements, 0 or more
	Offset  int64 // of the first element in the file, in bytes
}

// memory counts the tensor, its name and its shape.
func (t *Tensor) memory() int { return 4*containerBytes + wordBytes*(len(t.Shape)+len(t.Strides)) }

// Size returns the size of an element in bytes.
func (t *Tensor) Size() int { return t.DType.Bits() / 8 }

// Contiguous reports whether the elements follow each other in the file in row-major order.
func (t *Tensor) Contiguous() bool {
	want := 1
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Strides[i] != want && t.Elements() != 0 {
			return false
		}
		want *= t.Shape[i]
	}
	return true
}

// Elements returns the number of elements.
func (t *Tensor) Elements() int { return elements(t.Shape) }

// mostElements is the maximum number of elements of a tensor, so that its size in bits is a
// number for every type.
const mostElements = math.MaxInt / 64

// Views may repeat the bytes of a storage, such as the ones of Tensor.expand. A program that
// copies the tensors would fill a disk from a few bytes if views were unlimited.
const (
	mostRepeats = 64      // bytes of tensors for each byte of the files
	mostSmall   = 1 << 30 // bytes of tensors that files of any size may have
)

// CheckBytes returns an error if files of a number of bytes have too many bytes of tensors, each
// counted as a whole: more than 64 times their size, and more than 1 GiB.
func CheckBytes(tensors, files int64) error {
	if tensors > mostSmall && (tensors-1)/mostRepeats >= files {
		return fmt.Errorf("it has %d bytes or more of tensors in %d bytes, because views repeat elements: want at most %d times the size, or 1 GiB: save copies of the tensors without expand()",
			tensors, files, mostRepeats)
	}
	return nil
}

// span returns how many elements lie from the first element in the file to the last one.
func span(shape, strides []int) (int, error) {
	n, last := 1, 0
	for i, d := range shape {
		stride := strides[i]
		if d < 0 || stride < 0 {
			return 0, fmt.Errorf("shape %v with strides %v: want numbers of 0 or more", shape, strides)
		}
		if d != 0 && n > mostElements/d {
			return 0, fmt.Errorf("shape %v is larger than any memory", shape)
		}
		n *= d
		if d > 1 && stride > 0 {
			if stride > (math.MaxInt/8-last)/(d-1) {
				return 0, fmt.Errorf("shape %v with strides %v is larger than any file", shape, strides)
			}
			last += (d - 1) * stride
		}
	}
	if n == 0 {
		return 0, nil
	}
	return last + 1, nil
}

// dtypes are the types of torch that safetensors files have, too, by their names in torch, and
// storages the types of the elements of torch's storages.
var dtypes, storages = func() (dtypes, storages map[string]safetensors.DType) {
	dtypes = map[string]safetensors.DType{
		"float8_e8m0fnu": safetensors.F8E8M0, "float8_e4m3fnuz": safetensors.F8E4M3FNUZ,
		"float8_e5m2fnuz": safetensors.F8E5M2FNUZ, "complex64": safetensors.C64,
	}
	storages = map[string]safetensors.DType{"ComplexFloatStorage": safetensors.C64, "UntypedStorage": safetensors.U8}
	for _, row := range dtype.All() {
		format, err := safetensors.ParseDType(row.Safetensors)
		if err != nil {
			continue
		}
		dtypes[row.Name] = format
		if row.Storage != "" {
			storages[row.Storage] = format
		}
	}
	return dtypes, storages
}()
