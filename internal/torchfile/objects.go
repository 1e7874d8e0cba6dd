package torchfile

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/pickle"
)

// A global is a class or a function of Python: its module and its name.
type global string

// A dtype is a type of torch, as a value.
type dtype struct {
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

// objects interprets the classes and calls in files of torch.save.
type objects struct {
	archive *archive
	prefix  string // of the names of storages
	known   map[string]*storage
}

// calls are the functions and classes whose calls are known.
var calls = map[global]func(o *objects, args pickle.Tuple) (any, error){
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
		return dtype{name, format}, nil
	}
	if calls[full] != nil || full == "torch._tensor._rebuild_from_type_v2" || full == "torch.nn.parameter.Parameter" || full == "torch.Tensor" {
		return full, nil
	}
	return nil, fmt.Errorf("it has the global %s: only tensors of dense types, dictionaries, lists, numbers and texts are read, because other classes and functions would run code", full)
}

// Call returns the result of a function that this package knows.
func (o *objects) Call(fn any, args pickle.Tuple) (any, error) {
	name, ok := fn.(global)
	if !ok {
		return nil, fmt.Errorf("a call of a %T: want a function or a class", fn)
	}
	if name == "torch._tensor._rebuild_from_type_v2" { // of a subclass of Tensor: function, class, arguments, state
		if len(args) == 4 {
			if inner, ok := args[2].(pickle.Tuple); ok && args[0] != any(name) {
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
	case *pickle.Dict, *Tensor:
		return nil
	}
	return fmt.Errorf("it sets the state of a %T: want a dictionary or a tensor", object)
}

// Persistent returns the storage of an identifier: the word storage, the class, the key, the
// device, and the number of elements.
func (o *objects) Persistent(id any) (any, error) {
	t, ok := id.(pickle.Tuple)
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

// tensor returns the tensor of torch's rebuild functions. Their arguments are the storage, the
// offset in it, the shape, the strides, whether the tensor needs a gradient, and its hooks. The
// type follows if the storage has none. Flags of the elements may follow.
func (o *objects) tensor(args pickle.Tuple) (any, error) {
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
	case dtype:
		if t.DType = x.format; t.DType.Bits() < 8 {
			return fmt.Errorf("a tensor of type torch.%s: safetensors files have no such type", x.name)
		}
	case *pickle.Dict:
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
	t, ok := v.(pickle.Tuple)
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

// orderedDict returns an empty dictionary. The writer adds the entries later.
func orderedDict(_ *objects, args pickle.Tuple) (any, error) {
	if len(args) > 0 {
		return nil, errors.New("it has arguments")
	}
	return &pickle.Dict{}, nil
}

// first returns the first argument.
func first(_ *objects, args pickle.Tuple) (any, error) {
	if len(args) == 0 {
		return nil, errors.New("it has no argument")
	}
	return args[0], nil
}

// device returns the name of a device.
func device(_ *objects, args pickle.Tuple) (any, error) {
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
