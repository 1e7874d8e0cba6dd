package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// ReshardConfig are the options of Reshard; nil means their defaults.
type ReshardConfig struct {
	// Files is the number of files, from 1 to the number of tensors. 0 uses MaxFileBytes.
	Files int
	// MaxFileBytes is the most bytes of tensors in a file; a larger tensor gets a file for
	// itself. 0 means that files have any size. It must be 0 if Files is not.
	MaxFileBytes int64
	// Progress is called with the bytes written so far and the total, by one goroutine at a
	// time.
	Progress func(done, total int64)
}

// Reshard writes the tensors of a checkpoint of any format that Open reads to
// another number of files, on the host, without a device. The result is a
// folder as a Saver writes it, with digests, and with an index for Hugging
// Face's readers. OpenSaved, Latest and Restore accept it. Its tensors are
// whole, and it keeps the step, the number of ranks and their values. The step
// of a checkpoint that has none is the number in the name of the folder, such
// as step-00000100, or 0.
//
// If from is the folder of a Saver, Reshard first verifies its digests, so that a damaged byte
// does not get a new digest.
//
// The folder appears atomically and complete, or not at all. If the folder to is a checkpoint of
// a Saver, perhaps from itself, the new folder replaces it. Any other existing file is an error.
// The memory is as in [Checkpoint.Export].
func Reshard(ctx context.Context, from, to string, cfg *ReshardConfig) error {
	return reshard(ctx, from, to, cfg, systemFiles{filepath.Dir(filepath.Clean(to))})
}

func reshard(ctx context.Context, from, to string, cfg *ReshardConfig, fs fileSystem) error {
	r := &resharding{from: from, to: filepath.Clean(to), fs: fs}
	r.cfg = *cmp.Or(cfg, new(ReshardConfig))
	err := r.open(ctx)
	if err == nil {
		r.temp = filepath.Join(filepath.Dir(r.to), tempPrefix+filepath.Base(r.to)+"-"+rand.Text()[:8])
		if err = r.run(ctx); err != nil {
			err = errors.Join(err, r.fs.RemoveAll(r.temp))
		}
	}
	if err = errors.Join(err, r.source.Close()); err != nil {
		return fmt.Errorf("checkpoint: reshard %s to %s: %w", from, to, err)
	}
	return nil
}

// A resharding is a call of Reshard.
type resharding struct {
	cfg      ReshardConfig
	from, to string
	temp     string // the folder until it is complete
	fs       fileSystem
	source   *Checkpoint
	m        *manifest
	shards   []safetensors.Shard
	replaces bool
}

// open checks the arguments, and opens and verifies the source.
func (r *resharding) open(ctx context.Context) error {
	if r.cfg.Files < 0 || r.cfg.MaxFileBytes < 0 || r.cfg.Files > 0 && r.cfg.MaxFileBytes > 0 {
		return fmt.Errorf("%d files of at most %d bytes: want one of the two numbers", r.cfg.Files, r.cfg.MaxFileBytes)
	}
	if r.replaces = isSaved(r.to); exists(r.to) && !r.replaces {
		return fmt.Errorf("%s exists and is not a checkpoint with a %s: choose another name", r.to, manifestName)
	}
	r.m = &manifest{Version: manifestVersion, ID: rand.Text(), Ranks: 1}
	if step, ok := stepOf(filepath.Base(r.to)); ok {
		r.m.Step = step
	}
	if isSaved(r.from) {
		if err := r.keep(ctx); err != nil {
			return err
		}
	}
	var err error
	if r.source, err = Open([]string{r.from}, nil); err != nil {
		return err
	}
	return r.divide()
}

// keep verifies a checkpoint of a Saver, and keeps what its manifest says about the training.
func (r *resharding) keep(ctx context.Context) error {
	s, err := OpenSaved(r.from)
	if err != nil {
		return err
	}
	r.m.Step, r.m.Ranks, r.m.Values = s.m.Step, s.m.Ranks, s.m.Values
	if step, ok := stepOf(filepath.Base(r.to)); ok && step != r.m.Step {
		err = fmt.Errorf("%s has the name of step %d, and the checkpoint is of step %d: give the folder another name", r.to, step, r.m.Step)
	}
	return errors.Join(err, s.Verify(ctx), s.Close())
}

// divide distributes the tensors over the files.
func (r *resharding) divide() (err error) {
	all := r.source.entries()
	most := r.cfg.MaxFileBytes
	if r.cfg.Files <= 1 {
		if most == 0 {
			most = max(r.source.Bytes(), 1)
		}
		r.shards, err = safetensors.Split("model", all, most)
		return err
	}
	if r.cfg.Files > max(len(all), 1) {
		return fmt.Errorf("%d files: want at most %d, the number of tensors", r.cfg.Files, max(len(all), 1))
	}
	r.shards = make([]safetensors.Shard, r.cfg.Files)
	left := r.source.Bytes()
	for i := range r.shards {
		r.shards[i].File = fmt.Sprintf("model-%05d-of-%05d%s", i+1, r.cfg.Files, extension)
		others := r.cfg.Files - i - 1
		room := left / int64(others+1)
		for has := int64(0); len(all) > others; all = all[1:] {
			info, _ := r.source.Info(all[0].Name)
			n := info.Bytes()
			if others > 0 && len(r.shards[i].Tensors) > 0 && has+n/2 > room {
				break
			}
			has, left = has+n, left-n
			r.shards[i].Tensors = append(r.shards[i].Tensors, all[0])
		}
	}
	return nil
}

// run writes the folder and makes it visible.
func (r *resharding) run(ctx context.Context) error {
	if err := r.fs.MkdirAll(r.temp); err != nil {
		return err
	}
	r.m.Files = make([]savedFile, len(r.shards))
	sums := make([]map[string]hash.Hash, len(r.shards))
	moved := progress(r.cfg.Progress, r.source.Bytes())
	err := each(ctx, numbers(len(r.shards)), func(ctx context.Context, number string) (err error) {
		i, _ := strconv.Atoi(number)
		sums[i], err = r.write(ctx, i, moved)
		return err
	})
	if err != nil {
		return err
	}
	r.describe(sums)
	if err := r.m.write(r.fs, r.temp); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return reveal(r.fs, r.temp, r.to, r.replaces)
}

// write writes a file, and returns the hashes of its tensors.
func (r *resharding) write(ctx context.Context, i int, moved func(int)) (map[string]hash.Hash, error) {
	h, start, err := safetensors.NewHeader(r.shards[i].Tensors, r.source.headerTexts())
	if err != nil {
		return nil, err
	}
	r.m.Files[i] = savedFile{Name: r.shards[i].File, Bytes: h.Size, SHA256: digest(start)}
	f, err := r.fs.Create(filepath.Join(r.temp, r.shards[i].File))
	if err != nil {
		return nil, err
	}
	sums := map[string]hash.Hash{}
	err = r.source.writeFile(ctx, io.NewOffsetWriter(f, 0), start, h, func(name string) hash.Hash {
		sums[name] = sha256.New()
		return sums[name]
	}, moved)
	if err == nil {
		err = f.Sync()
	}
	return sums, errors.Join(err, f.Close())
}

// describe fills the manifest.
func (r *resharding) describe(sums []map[string]hash.Hash) {
	for i, shard := range r.shards {
		for _, t := range shard.Tensors {
			n := product(t.Shape)
			r.m.Tensors = append(r.m.Tensors, savedTensor{Name: t.Name, DType: t.DType.String(), Shape: slices.Clone(t.Shape), Rows: 1, Width: n,
				Parts: []savedPart{{File: i, Key: t.Name, Len: n, SHA256: hex.EncodeToString(sums[i][t.Name].Sum(nil))}}})
		}
	}
	slices.SortFunc(r.m.Tensors, func(a, b savedTensor) int { return cmp.Compare(a.Name, b.Name) })
	if r.m.Values == nil {
		r.m.Values = []json.RawMessage{json.RawMessage("null")}
	}
}

// Export writes all tensors as safetensors files on the host, without a device: the file at
// path, which ends in .safetensors. If the tensors have more than MaxFileBytes, Export writes
// several files and an index, as Save does, which replace older files in the same way. Each
// tensor is stored whole and contiguous.
//
// If cfg has no Metadata, the files have the metadata of the checkpoint, and "format": "pt",
// which Hugging Face's readers want. Export needs 8 MiB of memory for each file that it writes
// at the same time, at most 16, and returns when the files are on the disk.
func (c *Checkpoint) Export(ctx context.Context, path string, cfg *SaveConfig) error {
	if err := c.check("export"); err != nil {
		return err
	}
	sc := *cmp.Or(cfg, new(SaveConfig))
	if !strings.HasSuffix(path, extension) || sc.MaxFileBytes < 0 {
		return fmt.Errorf("checkpoint: export to %s in files of %d bytes: want a name that ends in %s, and 0 bytes or more", path, sc.MaxFileBytes, extension)
	}
	if sc.Metadata == nil {
		sc.Metadata = c.headerTexts()
	}
	out, err := newOutput(path, c.entries(), &sc)
	if err != nil {
		return err
	}
	defer out.close() // removes files that were not committed
	if err := out.open(); err != nil {
		return err
	}
	moved := progress(sc.Progress, c.Bytes())
	err = each(ctx, numbers(len(out.files)), func(ctx context.Context, number string) error {
		i, _ := strconv.Atoi(number)
		return files.Of(out.files[i]).WriteHost(func(w io.Writer) error {
			return c.writeFile(ctx, w, out.starts[i], out.headers[i], nil, moved)
		})
	})
	if err == nil {
		err = out.commit(ctx)
	}
	return ended(ctx, "export to "+path, err)
}

// headerTexts returns the metadata of the checkpoint, and the format.
func (c *Checkpoint) headerTexts() map[string]string {
	texts := map[string]string{"format": "pt"}
	maps.Copy(texts, c.metadata)
	return texts
}

// entries describes the tensors for the header of a file.
func (c *Checkpoint) entries() []safetensors.Tensor {
	var all []safetensors.Tensor
	for _, t := range c.infos {
		all = append(all, safetensors.Tensor{Name: t.Name, DType: t.Format, Shape: t.Shape})
	}
	return all
}

// numbers returns the numbers below n as texts.
func numbers(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	return all
}

// writeFile writes a safetensors file, and adds each tensor to the hash that
// digest returns unless digest is nil.
func (c *Checkpoint) writeFile(ctx context.Context, w io.Writer, start []byte, h *safetensors.Header, digest func(name string) hash.Hash, moved func(int)) error {
	if _, err := w.Write(start); err != nil {
		return err
	}
	host := make([]byte, verifyChunk)
	for i := range h.Tensors {
		t := &h.Tensors[i]
		to := w
		if digest != nil {
			to = io.MultiWriter(w, digest(t.Name))
		}
		for at := int64(0); at < t.Bytes(); at += int64(len(host)) {
			n := min(int64(len(host)), t.Bytes()-at)
			if err := c.read(ctx, t.Name, host[:n], at); err != nil {
				return err
			}
			if _, err := to.Write(host[:n]); err != nil {
				return fmt.Errorf("tensor %q at byte %d: %w", t.Name, t.Begin+at, err)
			}
			if moved != nil {
				moved(int(n))
			}
		}
	}
	return nil
}

// Weights are the tensors of a checkpoint on one rank, in one allocation, each at an address
// that is a multiple of 512 bytes.
type Weights struct {
	rank, ranks int
	slab        tensor.Tensor
	parts       map[string]*placed
	order       []*placed // the tensors of all ranks
}

func newWeights(l *local, ranks int, slab tensor.Tensor, tensors []*placed) *Weights {
	w := &Weights{rank: l.rank, ranks: ranks, slab: slab, parts: map[string]*placed{}, order: tensors}
	for _, t := range tensors {
		if t.cut.holds(l.rank) {
			w.parts[t.info.Name] = t
		}
	}
	return w
}

// Names returns the names of the rank's tensors, in file order.
func (w *Weights) Names() []string {
	names := make([]string, 0, len(w.parts))
	for _, t := range w.order {
		if w.parts[t.info.Name] != nil {
			names = append(names, t.info.Name)
		}
	}
	return names
}

// Tensor returns the rank's part of a tensor, in the memory of the weights. To use it after
// Close, keep a Retain of the tensor.
func (w *Weights) Tensor(name string) (tensor.Tensor, error) {
	t, err := w.part(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return cutOut(w.slab, t.at[w.rank], t.to, t.cut.shapeOf(w.rank, t.info.Shape)...)
}

// Part returns the rank's part of a tensor: the range of a dimension, or -1 and an empty range
// if the rank has the whole tensor.
func (w *Weights) Part(name string) (dim int, r Range, err error) {
	t, err := w.part(name)
	if err != nil || t.cut.dim < 0 {
		return -1, Range{}, err
	}
	return t.cut.dim, t.cut.ranges[w.rank], nil
}

func (w *Weights) part(name string) (*placed, error) {
	if w == nil {
		return nil, fmt.Errorf("checkpoint: tensor %q: no weights given", name)
	}
	t := w.parts[name]
	if t != nil {
		return t, nil
	}
	for _, o := range w.order {
		if o.info.Name == name {
			return nil, fmt.Errorf("checkpoint: weights: rank %d has no part of tensor %q: the plan gave it to others", w.rank, name)
		}
	}
	return nil, fmt.Errorf("checkpoint: weights: there is no tensor %q", name)
}

// Get returns the rank's part of a tensor as a slice of its elements, in the
// memory of the weights. The elements must be of type T, and the part must have
// the shape if one is given.
func Get[T memory.Element](w *Weights, name string, shape ...int) (memory.Slice[T], error) {
	x, err := w.Tensor(name)
	if err != nil {
		return memory.Slice[T]{}, err
	}
	if want := memory.DTypeOf[T](); x.DType() != want {
		return memory.Slice[T]{}, fmt.Errorf("checkpoint: weights: tensor %q is of type %s: want %s", name, x.DType(), want)
	}
	if len(shape) > 0 && !slices.Equal(shape, x.Shape()) {
		return memory.Slice[T]{}, fmt.Errorf("checkpoint: weights: tensor %q has shape %v: want %v", name, x.Shape(), shape)
	}
	return tensor.Slice[T](x)
}

// Bytes returns the size of the rank's memory, with its padding.
func (w *Weights) Bytes() int { return w.slab.Bytes() }

// Close frees the memory once pending work has finished on the stream that loaded it: the group's, or the stream
// of LoadOn. It is idempotent and safe on nil.
func (w *Weights) Close() error {
	if w == nil {
		return nil
	}
	return w.slab.Close()
}
