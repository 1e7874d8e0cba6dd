package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// SaveConfig are the options of Save, SaveOn and SaveTensors; nil means their defaults. They
// must be the same on all ranks, except Progress.
type SaveConfig struct {
	// MaxFileBytes is the most bytes of tensors in a file; a larger tensor gets a file for
	// itself. 0 is one file for all.
	MaxFileBytes int64
	// Metadata are the texts in the header of each file.
	Metadata map[string]string
	// Progress is as in LoadConfig, for written bytes.
	Progress func(done, total int64)
	// RoundBytes is as in LoadConfig.
	RoundBytes int
	// File are the options of the files; nil are their defaults.
	File *gds.FileConfig
}

// Save writes the tensors that the ranks have together as a checkpoint: the file at path,
// which ends in .safetensors. If the tensors have more than MaxFileBytes, Save writes several
// files, NAME-00001-of-0000N.safetensors, and an index, NAME.safetensors.index.json. weights
// has one Weights for each local rank, as Load returned them. Each byte is written once, by a
// rank that has it. Save comes after the work that is now on the group's streams, and returns
// when everything is on the disk. All processes must see the folder. Collective.
//
// When all files are complete and on the disk, they replace the old files one after the other,
// and the index last. Before that, and after an earlier error or crash, the old files are
// unchanged. To replace several files at once, save to a new folder. Other files of an older
// checkpoint stay. Only an index of the same name is removed if there is one file, because
// Open would read it first.
func Save(ctx context.Context, g *comm.Group, path string, weights []*Weights, cfg *SaveConfig) error {
	w, err := peersOf(g)
	if err != nil {
		return fmt.Errorf("checkpoint: save: %w", err)
	}
	return save(ctx, w, path, weights, cfg)
}

// SaveOn is Save for weights of LoadOn, after the work that is enqueued on s.
func SaveOn(ctx context.Context, s *stream.Stream, path string, weights *Weights, cfg *SaveConfig) error {
	return save(ctx, peersOn(s), path, []*Weights{weights}, cfg)
}

// A saving is a checkpoint that is being written.
type saving struct {
	*executor
	cfg     SaveConfig
	out     *output
	tensors []*placed
}

func save(ctx context.Context, w *peers, path string, weights []*Weights, cfg *SaveConfig) error {
	s := newSaving(w, path, cfg)
	return errors.Join(s.steps(ctx, s.begin(weights)), s.release())
}

func newSaving(w *peers, path string, cfg *SaveConfig) *saving {
	s := &saving{executor: &executor{peers: w, op: "save", path: path}}
	s.cfg = *cmp.Or(cfg, new(SaveConfig))
	return s
}

// begin does the work of this process before it hears from the others.
func (s *saving) begin(weights []*Weights) error {
	err := s.prepare(weights)
	if err == nil && s.isRoot() {
		err = s.out.create()
		s.files = s.out.files
	}
	return err
}

// steps does the work that all processes do together, after begin has returned
// err. All processes agree at the end of each step, so that none goes on alone.
func (s *saving) steps(ctx context.Context, err error) error {
	if err := s.agreeAlone(ctx, err, s.fingerprint(s.tensors, s.cfg.RoundBytes)); err != nil {
		return err
	}
	if s.remote() {
		if err := s.join(ctx); err != nil {
			return err
		}
	}
	s.store(ctx)
	for _, f := range s.files {
		if !s.failed() {
			s.setErrorOfAll(f.Sync(ctx))
		}
	}
	if err := s.agree(ctx, s.op, s.path, s.named(s.errs()), ""); err != nil {
		return err
	}
	err = nil
	if s.isRoot() {
		err = s.out.commit(ctx)
	}
	return s.agreeAlone(ctx, err, "")
}

// agreeAlone is agree for an error of the process, not of one of its ranks.
func (s *saving) agreeAlone(ctx context.Context, err error, plan string) error {
	errs := make([]error, len(s.peers.locals))
	errs[0] = err
	return s.agree(ctx, s.op, s.path, errs, plan)
}

// isRoot reports whether this process has rank 0, and so makes the files.
func (s *saving) isRoot() bool { return s.peers.locals[0].rank == 0 }

// prepare checks the arguments and makes the schedule.
func (s *saving) prepare(weights []*Weights) error {
	if s.cfg.MaxFileBytes < 0 || s.cfg.RoundBytes < 0 {
		return fmt.Errorf("checkpoint: save %s: files of %d bytes and rounds of %d: want 0 or more", s.path, s.cfg.MaxFileBytes, s.cfg.RoundBytes)
	}
	if s.cfg.RoundBytes == 0 {
		s.cfg.RoundBytes = defaultRound
	}
	if err := errors.Join(s.peers.prepare(), s.check(weights)); err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", s.path, err)
	}
	var infos []safetensors.Tensor
	byName := map[string]*placed{}
	for _, t := range weights[0].order {
		info, err := t.savedAs(s.ranks)
		if err != nil {
			return &TensorError{Op: "save", Path: s.path, Tensor: t.info.Name, Offset: -1, Err: err}
		}
		infos = append(infos, info)
		byName[info.Name] = t
	}
	var err error
	if s.out, err = newOutput(s.path, infos, &s.cfg); err != nil {
		return err
	}
	s.headers = s.out.headers
	for i, h := range s.headers {
		for j := range h.Tensors {
			t := *byName[h.Tensors[j].Name]
			t.info.DType, t.from = t.to, t.to.Size()
			t.file, t.off = i, h.Tensors[j].Begin
			s.tensors = append(s.tensors, &t)
		}
	}
	for _, w := range weights {
		s.slabs = append(s.slabs, w.slab)
	}
	s.plan = newSchedule(s.tensors, s.ranks, s.cfg.RoundBytes, false)
	s.moved = progress(s.cfg.Progress, s.plan.bytes(s.peers.locals))
	return s.open()
}

// check validates the arguments.
func (s *saving) check(weights []*Weights) error {
	if !strings.HasSuffix(s.path, extension) {
		return fmt.Errorf("want a name that ends in %s", extension)
	}
	if len(weights) != len(s.peers.locals) {
		return fmt.Errorf("%d weights for %d local ranks: give those that Load returned", len(weights), len(s.peers.locals))
	}
	for i, l := range s.peers.locals {
		w := weights[i]
		switch {
		case w == nil:
			return fmt.Errorf("there are no weights of rank %d", l.rank)
		case w.rank != l.rank || w.ranks != s.ranks:
			return fmt.Errorf("the weights of rank %d of %d are given for rank %d of %d", w.rank, w.ranks, l.rank, s.ranks)
		case !sameLoad(w, weights[0]):
			return fmt.Errorf("the weights of ranks %d and %d are of different loads", weights[0].rank, w.rank)
		}
		if err := strided.Check("weights", w.slab, l.device()); err != nil {
			return err
		}
	}
	return nil
}

// sameLoad reports whether weights come from one call.
func sameLoad(a, b *Weights) bool {
	return len(a.order) == len(b.order) && (len(a.order) == 0 || &a.order[0] == &b.order[0])
}

// savedAs returns the file's description of a tensor, and fails unless the
// ranks have all its elements.
func (t *placed) savedAs(ranks int) (safetensors.Tensor, error) {
	format, ok := formats[t.to]
	if !ok {
		return safetensors.Tensor{}, fmt.Errorf("the format has no type %s: %w", t.to, errors.ErrUnsupported)
	}
	if missing, is := t.cut.gap(); is {
		return safetensors.Tensor{}, fmt.Errorf("no rank has index %d of dimension %d: it cannot be saved", missing, t.cut.dim)
	}
	return safetensors.Tensor{Name: t.info.Name, DType: format, Shape: t.info.Shape}, nil
}

// join lets the other processes open the files that the first one made.
func (s *saving) join(ctx context.Context) error {
	long, cancel := messageContext(ctx)
	defer cancel()
	var temps []string
	for _, f := range s.files {
		temps = append(temps, files.Of(f).Temp())
	}
	err := comm.BroadcastValue(long, s.group, 0, &temps, nil)
	if err == nil && !s.isRoot() && len(temps) != len(s.out.shards) {
		err = fmt.Errorf("rank 0 has made %d files: want %d: %w", len(temps), len(s.out.shards), comm.ErrMismatch)
	}
	for i := 0; err == nil && !s.isRoot() && i < len(temps); i++ {
		var f *gds.File
		if f, err = gds.OpenFile(temps[i], os.O_RDWR, s.cfg.File); err == nil {
			files.Of(f).Rename(s.out.file(i))
			s.out.files = append(s.out.files, f)
		}
	}
	s.files = s.out.files
	return s.agreeAlone(ctx, err, "")
}

// release closes the files and frees the memory and streams of prepare.
func (s *saving) release() error {
	return errors.Join(s.close(), s.out.close(), s.peers.close())
}

// SaveTensors writes tensors of the device of s, of any layout, as Save writes weights
// (safetensors.torch.save_file). It comes after the work that is now on s.
func SaveTensors(ctx context.Context, s *stream.Stream, path string, tensors map[string]tensor.Tensor, cfg *SaveConfig) error {
	c := *cmp.Or(cfg, new(SaveConfig))
	infos, err := describe(s, path, tensors, c.MaxFileBytes)
	if err != nil {
		return err
	}
	out, err := newOutput(path, infos, &c)
	if err != nil {
		return err
	}
	defer out.close() // removes files that were not committed
	if err := out.create(); err != nil {
		return err
	}
	total := int64(0)
	for _, x := range tensors {
		total += int64(x.Bytes())
	}
	moved := progress(c.Progress, total)
	for i, f := range out.files {
		if err := writeTensors(ctx, f, s, out.headers[i], tensors, moved); err != nil {
			return err
		}
	}
	return ended(ctx, "save "+path, out.commit(ctx))
}

// describe checks the tensors and describes them for the files, by name.
func describe(s *stream.Stream, path string, tensors map[string]tensor.Tensor, most int64) ([]safetensors.Tensor, error) {
	if err := gpu.CheckStream("checkpoint: save", s, nil); err != nil {
		return nil, err
	}
	if !strings.HasSuffix(path, extension) || most < 0 {
		return nil, fmt.Errorf("checkpoint: save %s in files of %d bytes: want a name that ends in %s, and 0 bytes or more", path, most, extension)
	}
	var infos []safetensors.Tensor
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		x := tensors[name]
		format, ok := formats[x.DType()]
		err := strided.Check("checkpoint: save", x, nil)
		if err == nil && x.IsHost() {
			err = errors.New("it is in host memory: copy it to the device of the stream")
		}
		if err == nil {
			err = strided.Check("checkpoint: save", x, s.Device())
		}
		if err == nil && !ok {
			err = fmt.Errorf("the format has no type %s: %w", x.DType(), errors.ErrUnsupported)
		}
		if err != nil {
			return nil, &TensorError{Op: "save", Path: path, Tensor: name, Offset: -1, Err: err}
		}
		infos = append(infos, safetensors.Tensor{Name: name, DType: format, Shape: x.Shape()})
	}
	return infos, nil
}

// writeTensors writes the tensors of a header. It first copies tensors that are
// not contiguous, one at a time.
func writeTensors(ctx context.Context, f *gds.File, s *stream.Stream, h *safetensors.Header, tensors map[string]tensor.Tensor, moved func(int)) error {
	var rows []files.Piece
	for i := range h.Tensors {
		t := &h.Tensors[i]
		x := tensors[t.Name]
		if x.Contiguous() {
			p, err := pieceOf(x, t.Begin)
			if err != nil {
				return err
			}
			rows = append(rows, p)
			continue
		}
		if err := writePacked(ctx, f, s, x, t.Begin, moved); err != nil {
			return &TensorError{Op: "save", Path: f.Path(), Tensor: t.Name, Offset: t.Begin, Err: err}
		}
	}
	return files.Of(f).Write(ctx, s, rows, files.Hooks{Moved: moved})
}

func writePacked(ctx context.Context, f *gds.File, s *stream.Stream, x tensor.Tensor, off int64, moved func(int)) error {
	packed, err := tensor.Make(s, x.DType(), x.Shape()...)
	if err != nil {
		return err
	}
	defer packed.Close()
	if err := tensor.Copy(s, packed, x); err != nil {
		return err
	}
	p, err := pieceOf(packed, off)
	if err != nil {
		return err
	}
	return files.Of(f).Write(ctx, s, []files.Piece{p}, files.Hooks{Moved: moved})
}

// pieceOf returns all bytes of a contiguous tensor.
func pieceOf(x tensor.Tensor, off int64) (files.Piece, error) {
	if x.Len() == 0 {
		return files.Piece{Off: off}, nil
	}
	mem, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
	return files.Piece{Off: off, Mem: mem}, err
}

// A Part is a rank's share of a named tensor of a training state. A rank has at most one part
// of a tensor.
type Part struct {
	// Name is the name of the whole tensor, the same on all ranks.
	Name string
	// Data is the rank's part: a contiguous tensor on the device of the rank.
	Data tensor.Tensor
	// Shape is the shape of the whole tensor. nil says that Data is the whole tensor; if
	// several ranks have it, one of them writes it.
	Shape []int
	// Start is the first index of dimension Dim that Data has. Data has all indices of the
	// other dimensions.
	Start, Dim int
	// Flat says that Data is a run of the elements of the whole tensor in row-major order, as
	// a rank of a ddp.Sharder has it. Start is the number of its first element, and Dim is 0.
	Flat bool
}

// A box is the elements of a part: from each of Rows rows of Width elements, the Len elements
// from Start on.
type box struct{ Rows, Width, Start, Len int }

func (b box) elements() int { return b.Rows * b.Len }

// A partInfo is the description of a part that ranks exchange.
type partInfo struct {
	Name   string
	Format safetensors.DType
	Shape  []int // of the whole tensor
	Stored []int // of the part in a file
	Box    box
}

// bytes returns the size of the part.
func (p *partInfo) bytes() int64 { return int64(p.Box.elements()) * int64(p.Format.Bits()/8) }

// whole reports whether the part is the whole tensor.
func (p *partInfo) whole() bool { return p.Box.Len == p.Box.Width }

// describe checks a part of a rank on the device of s.
func (p *Part) describe(op string, s *stream.Stream) (info partInfo, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint: %s: part of tensor %q: %w", op, p.Name, err)
		}
	}()
	if p.Name == "" {
		return info, errors.New("it has no name")
	}
	if err := strided.Check("checkpoint", p.Data, s.Device()); err != nil {
		return info, err
	}
	if p.Data.IsHost() || !p.Data.Contiguous() {
		return info, fmt.Errorf("%s: want contiguous memory of a device", p.Data)
	}
	format, ok := formats[p.Data.DType()]
	if !ok {
		return info, fmt.Errorf("the format has no type %s: %w", p.Data.DType(), errors.ErrUnsupported)
	}
	info = partInfo{Name: p.Name, Format: format, Shape: p.Shape, Stored: p.Data.Shape()}
	if p.Shape == nil {
		info.Shape = p.Data.Shape()
	}
	if !fits(info.Shape, p.Data.DType().Size()) || slices.ContainsFunc(info.Shape, func(n int) bool { return n < 0 }) {
		return info, fmt.Errorf("shape %v is larger than any memory, or negative", info.Shape)
	}
	if info.Box, err = p.box(info.Shape); err == nil && product(info.Shape) == 0 {
		info.Box = box{Rows: 1} // however it is cut
	}
	return info, err
}

// box returns the elements of the part of a tensor of the given shape.
func (p *Part) box(shape []int) (box, error) {
	n := product(shape)
	switch {
	case p.Shape == nil && (p.Start != 0 || p.Dim != 0 || p.Flat):
		return box{}, errors.New("the Shape of the whole tensor is not set, but Start, Dim or Flat is")
	case p.Shape == nil:
		return box{1, n, 0, n}, nil
	case p.Flat:
		if p.Start < 0 || p.Data.Len() > n-p.Start || p.Dim != 0 {
			return box{}, fmt.Errorf("elements %d to %d of %d, along dimension %d: they do not exist", p.Start, p.Start+p.Data.Len(), n, p.Dim)
		}
		return box{1, n, p.Start, p.Data.Len()}, nil
	}
	return p.boxOfDim(shape)
}

func (p *Part) boxOfDim(shape []int) (box, error) {
	dim, err := strided.WrapDim(p.Dim, len(shape))
	if err == nil && len(shape) == 0 {
		err = errors.New("a tensor of one element has no dimension")
	}
	if err != nil {
		return box{}, err
	}
	have := p.Data.Shape()
	for i := range shape {
		if len(have) != len(shape) || i != dim && have[i] != shape[i] {
			return box{}, fmt.Errorf("shape %v as indices of dimension %d of shape %v: the other dimensions differ", have, dim, shape)
		}
	}
	if p.Start < 0 || have[dim] > shape[dim]-p.Start {
		return box{}, fmt.Errorf("indices %d to %d of dimension %d of shape %v do not exist", p.Start, p.Start+have[dim], dim, shape)
	}
	if have[dim] == shape[dim] {
		n := product(shape)
		return box{1, n, 0, n}, nil
	}
	inner := product(shape[dim+1:])
	return box{product(shape[:dim]), shape[dim] * inner, p.Start * inner, have[dim] * inner}, nil
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// describeParts checks the parts of a rank, and returns their descriptions by name.
func describeParts(op string, s *stream.Stream, parts []Part) ([]partInfo, error) {
	all := make([]partInfo, 0, len(parts))
	for i := range parts {
		info, err := parts[i].describe(op, s)
		if err != nil {
			return nil, err
		}
		all = append(all, info)
	}
	slices.SortFunc(all, func(a, b partInfo) int { return cmp.Compare(a.Name, b.Name) })
	for i := 1; i < len(all); i++ {
		if all[i].Name == all[i-1].Name {
			return nil, fmt.Errorf("checkpoint: %s: the rank has two parts of tensor %q: want one", op, all[i].Name)
		}
	}
	return all, nil
}

// bytesOf returns all bytes of a part in device memory.
func bytesOf(x tensor.Tensor) (memory.Slice[byte], error) {
	return memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
}

const (
	extension      = ".safetensors"
	indexExtension = ".index.json" // behind the name of a checkpoint of one file
)

// An output is the files of a checkpoint that is being written. They have other names until
// commit.
type output struct {
	path    string
	cfg     *SaveConfig
	shards  []safetensors.Shard
	headers []*safetensors.Header
	starts  [][]byte // the first bytes of each file
	files   []*gds.File
}

// newOutput divides tensors into files.
func newOutput(path string, infos []safetensors.Tensor, cfg *SaveConfig) (*output, error) {
	o := &output{path: path, cfg: cfg}
	most := cfg.MaxFileBytes
	if most == 0 {
		most = math.MaxInt64
	}
	var err error
	if o.shards, err = safetensors.Split(strings.TrimSuffix(filepath.Base(path), extension), infos, most); err != nil {
		return nil, fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	for _, s := range o.shards {
		h, start, err := safetensors.NewHeader(s.Tensors, cfg.Metadata)
		if err != nil {
			return nil, fmt.Errorf("checkpoint: save %s: %w", path, err)
		}
		o.headers, o.starts = append(o.headers, h), append(o.starts, start)
	}
	return o, nil
}

// file returns the path of a file.
func (o *output) file(i int) string { return filepath.Join(filepath.Dir(o.path), o.shards[i].File) }

// open opens the files.
func (o *output) open() error {
	for i := range o.shards {
		f, err := gds.Create(o.file(i), o.cfg.File)
		if err != nil {
			return err
		}
		o.files = append(o.files, f)
	}
	return nil
}

// create creates the files, with their headers, and reserves their space.
func (o *output) create() error {
	if err := o.open(); err != nil {
		return err
	}
	for i, f := range o.files {
		if err := files.Of(f).Begin(o.starts[i], o.headers[i].Size); err != nil {
			return err
		}
	}
	return nil
}

// commit lets the files replace the old ones, and then the index. If there is one file, an
// index of that name belongs to an older checkpoint, and Open would read it first.
func (o *output) commit(ctx context.Context) error {
	for _, f := range o.files {
		if err := f.Commit(ctx); err != nil {
			return err
		}
	}
	if len(o.shards) > 1 {
		return o.writeIndex(ctx)
	}
	if err := os.Remove(o.path + indexExtension); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("checkpoint: save %s: remove the index of an older checkpoint: %w", o.path, err)
	}
	return nil
}

func (o *output) writeIndex(ctx context.Context) error {
	x, err := safetensors.NewIndex(o.shards)
	if err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", o.path, err)
	}
	f, err := gds.Create(o.path+indexExtension, o.cfg.File)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := files.Of(f).WriteHost(x.Write); err != nil {
		return err
	}
	return f.Commit(ctx)
}

// close closes the files, and removes those that were not committed.
func (o *output) close() error {
	if o == nil {
		return nil
	}
	return closeAll(o.files)
}
