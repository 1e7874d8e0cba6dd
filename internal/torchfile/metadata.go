package torchfile

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/gochorus/chorus/gds/safetensors"
)

// MetadataName is the file of a folder of torch.distributed.checkpoint that describes the
// others.
const MetadataName = ".metadata"

// MostMetadata is the largest size of a metadata file that ReadMetadata accepts.
const MostMetadata = mostPickle

// mostChunks is the maximum number of chunks of a tensor.
const mostChunks = 4096

// A Metadata is the content of a folder of torch.distributed.checkpoint.
type Metadata struct {
	Tensors []Distributed
	Others  []string // names of values that are not tensors
}

// A Distributed is a tensor in chunks.
type Distributed struct {
	Name   string
	DType  safetensors.DType
	Shape  []int
	Chunks []Chunk // which cover the tensor, and do not overlap
}

// A Chunk is a rectangle of a tensor, and its place: a file of torch.save with one tensor, in
// the bytes of another file.
type Chunk struct {
	At, N          []int // first indices and numbers of indices
	File           string
	Offset, Length int64
}

// classes are the classes of a metadata file.
var classes = map[global]bool{}

func init() {
	for _, name := range []string{"metadata.Metadata", "metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata",
		"metadata.MetadataIndex", "metadata.TensorProperties", "metadata.StorageMeta", "metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo"} {
		classes[global("torch.distributed.checkpoint."+name)] = true
	}
	for _, name := range []string{"torch.distributed._shard.sharded_tensor.metadata.TensorProperties", "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
		"pathlib.PosixPath", "pathlib._local.PosixPath"} {
		classes[global(name)] = true
	}
}

// An instance is an object of a class.
type instance struct {
	class global
	state any
}

// memory is the size of the object. Its state is counted as a dictionary.
func (x *instance) memory() int { return 2 * containerBytes }

// mostFields is the maximum number of fields of an object. Objects may share one state, so that searching a long one for each
// of them would take quadratic time. The classes have at most 8.
const mostFields = 64

// field returns a field of an object.
func (x *instance) field(name string) any {
	if d, ok := x.state.(*Dict); ok && len(*d) <= mostFields {
		v, _ := d.Get(name)
		return v
	}
	return nil
}

// metadataObjects interprets the classes of a metadata file.
type metadataObjects struct{ objects }

func (o *metadataObjects) Global(module, name string) (any, error) {
	if full := global(module + "." + name); classes[full] {
		return full, nil
	}
	return o.objects.Global(module, name)
}

func (o *metadataObjects) Call(fn any, args Tuple) (any, error) {
	if name, ok := fn.(global); ok && classes[name] {
		return &instance{class: name}, nil
	}
	return o.objects.Call(fn, args)
}

func (o *metadataObjects) Build(object, state any) error {
	if x, ok := object.(*instance); ok {
		x.state = state
		return nil
	}
	return o.objects.Build(object, state)
}

func (o *metadataObjects) Persistent(any) (any, error) {
	return nil, errors.New("it has a storage: want only descriptions")
}

// ReadMetadata reads a metadata file without running code, and checks that the
// chunks cover their tensors.
func ReadMetadata(text []byte) (*Metadata, error) {
	v, err := DecodePickleObjects(bytes.NewReader(text), &PickleLimits{Bytes: mostPickle, Values: mostValues}, &metadataObjects{})
	if err != nil {
		return nil, fmt.Errorf("torch.distributed.checkpoint metadata: %w", err)
	}
	m, err := metadataOf(v, int64(len(text)))
	if err != nil {
		return nil, fmt.Errorf("torch.distributed.checkpoint metadata: %w", err)
	}
	return m, nil
}

// metadataOf interprets the value of a pickle of size bytes.
func metadataOf(v any, size int64) (*Metadata, error) {
	root, ok := v.(*instance)
	if !ok {
		return nil, fmt.Errorf("it is a %T: want an object of class Metadata", v)
	}
	list, ok := root.field("state_dict_metadata").(*Dict)
	stored, also := root.field("storage_data").(*Dict)
	if !ok || !also {
		return nil, errors.New("it lacks the list of tensors or their places")
	}
	p := &places{of: map[placeKey]Chunk{}, indices: map[string]string{}, most: memorySlack + memoryOfByte*size}
	if err := p.read(stored); err != nil {
		return nil, err
	}
	m, taken := &Metadata{}, map[string]bool{}
	for _, item := range *list {
		name, ok := item.Key.(string)
		x, also := item.Value.(*instance)
		switch {
		case !ok || !also || len(name) > mostName || taken[name]:
			return nil, fmt.Errorf("the entry %.80q has no unique name or no description", name)
		case x.field("chunks") == nil:
			m.Others = append(m.Others, name)
			continue
		}
		taken[name] = true
		t := Distributed{Name: name}
		if err := t.fill(x, p); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		m.Tensors = append(m.Tensors, t)
	}
	return m, nil
}

// A placeKey identifies a chunk: its tensor and its first indices, as a text.
type placeKey struct{ name, at string }

// places are the places of chunks. Objects of the pickle may share their names, indices and chunks, so that copies of them could take
// much more memory than the pickle: names and indices are shared here, too, and chunks are counted.
type places struct {
	of      map[placeKey]Chunk
	indices map[string]string // each text of indices, once
	memory  int64             // bytes of the chunks, with their indices
	most    int64             // for memory
}

func (p *places) key(name string, at []int) placeKey {
	text := fmt.Sprint(at)
	if _, ok := p.indices[text]; !ok {
		p.indices[text] = text
	}
	return placeKey{name, p.indices[text]}
}

// take counts the memory of a chunk with a number of dimensions.
func (p *places) take(dimensions int) error {
	if p.memory += int64(2*(containerBytes+wordBytes*dimensions) + 4*valueBytes); p.memory > p.most {
		return fmt.Errorf("its chunks take more than %d MiB of memory, which is much more than its size", p.most>>20)
	}
	return nil
}

// read reads the places of chunks.
func (p *places) read(stored *Dict) error {
	for _, item := range *stored {
		key, ok := item.Key.(*instance)
		x, also := item.Value.(*instance)
		if !ok || !also {
			return fmt.Errorf("a place is a %T for a %T", item.Value, item.Key)
		}
		name, _ := key.field("fqn").(string)
		at, isTensor := ints(key.field("offset"))
		if !isTensor {
			continue // of a value that is not a tensor
		}
		file, ok := x.field("relative_path").(string)
		off, isOff := x.field("offset").(int64)
		n, isLength := x.field("length").(int64)
		switch {
		case len(name) > mostName:
			return fmt.Errorf("a place of tensor %.80q…, whose name is longer than %d bytes", name, mostName)
		case !ok || !isOff || !isLength || off < 0 || n < 0 || off+n < 0:
			return fmt.Errorf("tensor %q: a place has no file, offset or length", name)
		case file != filepath.Base(file) || !filepath.IsLocal(file):
			return fmt.Errorf("tensor %q: file %q is outside of the folder", name, file)
		case strings.ContainsFunc(file, unicode.IsControl): // an error that names the file would have several lines
			return fmt.Errorf("tensor %q: the name of file %q has control characters", name, file)
		}
		if changes, ok := x.field("transform_descriptors").(*List); ok && len(*changes) > 0 {
			return fmt.Errorf("tensor %q is compressed or encrypted by an extension of torch.distributed.checkpoint", name)
		}
		if err := p.take(0); err != nil { // the place has no indices yet
			return err
		}
		p.of[p.key(name, at)] = Chunk{File: file, Offset: off, Length: n}
	}
	return nil
}

// fill reads the description of a tensor.
func (t *Distributed) fill(x *instance, p *places) error {
	shape, ok := ints(x.field("size"))
	chunks, also := x.field("chunks").(*List)
	properties, _ := x.field("properties").(*instance)
	if !ok || !also || properties == nil || len(*chunks) == 0 || len(*chunks) > mostChunks {
		return fmt.Errorf("it has no shape, type or chunks, or more than %d chunks", mostChunks)
	}
	if t.DType = dtypeOf(properties); t.DType.Bits() < 8 {
		return errors.New("its type is unknown")
	}
	t.Shape = shape
	if _, err := span(shape, make([]int, len(shape))); err != nil {
		return err
	}
	for _, v := range *chunks {
		c, ok := v.(*instance)
		if !ok {
			return fmt.Errorf("a chunk is a %T", v)
		}
		at, ok := ints(c.field("offsets"))
		n, also := ints(c.field("sizes"))
		if !ok || !also || !inside(shape, at, n) {
			return fmt.Errorf("a chunk of shape %v at %v is not inside of shape %v", n, at, shape)
		}
		if err := p.take(len(shape)); err != nil {
			return err
		}
		place, ok := p.of[p.key(t.Name, at)]
		if !ok {
			return fmt.Errorf("the chunk at %v has no place", at)
		}
		if elements(n) == 0 && len(t.Chunks) > 0 { // of a rank without elements: several may be in one place
			continue
		}
		place.At, place.N = at, n
		t.Chunks = append(t.Chunks, place)
	}
	return t.covered()
}

// dtypeOf returns the type in the properties of a tensor.
func dtypeOf(properties *instance) safetensors.DType {
	v := properties.field("dtype")
	if list, ok := properties.state.(Tuple); ok && len(list) > 0 {
		v = list[0]
	}
	d, _ := v.(torchType)
	return d.format
}

func inside(shape, at, n []int) bool {
	if len(at) != len(shape) || len(n) != len(shape) {
		return false
	}
	for d := range shape {
		if at[d] < 0 || n[d] < 0 || n[d] > shape[d] || at[d] > shape[d]-n[d] {
			return false
		}
	}
	return true
}

// covered checks that the chunks cover the tensor once.
func (t *Distributed) covered() error {
	all := 0
	for i, c := range t.Chunks {
		all += elements(c.N)
		for _, other := range t.Chunks[:i] {
			if c.overlaps(&other) {
				return fmt.Errorf("the chunks at %v and %v overlap", c.At, other.At)
			}
		}
	}
	if all != elements(t.Shape) {
		return fmt.Errorf("its chunks have %d elements: want %d", all, elements(t.Shape))
	}
	return nil
}

func (c *Chunk) overlaps(other *Chunk) bool {
	for d := range c.At {
		if max(c.At[d], other.At[d]) >= min(c.At[d]+c.N[d], other.At[d]+other.N[d]) {
			return false
		}
	}
	return len(c.At) > 0 || slices.Equal(c.At, other.At)
}

func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
