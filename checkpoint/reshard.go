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
	"path/filepath"
	"slices"
	"strconv"

	"github.com/gochorus/chorus/gds/safetensors"
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

// Reshard writes the tensors of a checkpoint of any format that Open reads to another number of
// files, on the host, without a device. The result is a folder as a Saver writes it, with
// digests, and with an index for Hugging Face's readers. OpenSaved, Latest and Restore accept
// it. Its tensors are whole. It keeps the step, the number of ranks and their values. The step
// of a checkpoint that has none is the number in the name of the folder, such as step-00000100,
// or 0.
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
	if cfg != nil {
		r.cfg = *cfg
	}
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
