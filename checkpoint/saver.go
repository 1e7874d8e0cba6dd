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
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/stream"
)

// SaverConfig are the options of NewSaver; nil means their defaults. They must be the same on
// all ranks.
type SaverConfig struct {
	// KeepLast is how many of the newest checkpoints stay. 0 keeps all.
	KeepLast int
	// KeepEvery lets each checkpoint stay whose step is a multiple of it. 0 keeps none
	// besides KeepLast.
	KeepEvery int64
	// HostBytes limits the pinned host memory of a process for snapshots. 0 is as much as
	// the process writes. If there is less, Save waits until files have taken the first bytes,
	// and training waits longer. Each rank has at least the memory of one run, up to 16 MiB.
	HostBytes int64
	// Refuse lets Save return ErrBusy if the previous save is not complete. Otherwise Save
	// waits for it.
	Refuse bool
	// Timeout is how long a complete process waits for the files of the others. 0 is 10
	// minutes. The wait ends at once if the group breaks, as it does when a rank is lost.
	Timeout time.Duration
}

// ErrBusy is the error of a save during the previous one, with SaverConfig.Refuse.
var ErrBusy = errors.New("the previous save is not complete")

// A Saver saves the state of a training while the training goes on
// (torch.distributed.checkpoint.async_save). Save and Close are for one goroutine; Wait and
// Progress may be called by several.
type Saver struct {
	folder string
	cfg    SaverConfig
	fs     fileSystem
	group  *comm.Group
	ranks  int
	root   bool // this process has rank 0
	nonce  string
	fence  *fence // nil without a job
	saves  int
	plan   *manifest
	locals []*snapshotter

	mu      sync.Mutex
	closed  bool
	last    *saveJob
	pending error // of the last save, not yet returned
}

// Progress is how far the last save is.
type Progress struct {
	Step        int64
	Done, Total int64 // bytes in the files of this process
	Complete    bool  // it ended, with or without an error
}

// A saveJob is one save.
type saveJob struct {
	step   int64
	id     string // the same on all ranks
	temp   string
	fence  *fence
	values []json.RawMessage
	moved  atomic.Int64
	total  int64
	done   chan struct{}
	err    error // after done
}

// NewSaver prepares saves of parts to folders step-00000100 within folder.
// parts has the parts of each local rank, whose memory stays the same for all
// saves, because the ranks exchange descriptions of their parts here, and not
// in Save. Together the parts must be whole tensors. If several ranks have the
// same part, the rank with the least work writes it. All processes must see the
// folder, and no other job may save to it. In a job of package cluster,
// NewSaver ends the saves of earlier epochs: a process that runs on in one
// cannot complete a save or remove a checkpoint any more. For that, each epoch
// has a folder .saving-epoch-... within folder, for saves that are not complete.
// The last one stays when the job ends, because it keeps processes of earlier
// epochs out, and is empty unless a save has failed. The next job that saves to
// folder removes it; without another job, it may be removed by hand. Collective.
func NewSaver(ctx context.Context, g *comm.Group, folder string, parts [][]Part, cfg *SaverConfig) (*Saver, error) {
	return newSaver(ctx, g, folder, parts, cfg, systemFiles{folder})
}

func newSaver(ctx context.Context, g *comm.Group, folder string, parts [][]Part, cfg *SaverConfig, fs fileSystem) (*Saver, error) {
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: new saver: %w", err)
	}
	v := &Saver{folder: folder, fs: fs, group: g, ranks: w.ranks, root: w.locals[0].rank == 0, fence: fenceOf(g)}
	v.cfg = *cmp.Or(cfg, new(SaverConfig))
	if v.cfg.Timeout == 0 {
		v.cfg.Timeout = 10 * time.Minute
	}
	by, err := exchange(ctx, w, "new saver", folder, parts)
	if err != nil {
		return nil, err
	}
	if err := v.begin(ctx, w, by, parts); err != nil {
		return nil, errors.Join(err, v.release())
	}
	return v, nil
}

// exchange returns the descriptions of the parts of all ranks.
func exchange(ctx context.Context, w *peers, op, folder string, parts [][]Part) ([][]partInfo, error) {
	mine := make([][]partInfo, len(w.locals))
	errs := make([]error, len(w.locals))
	for i, l := range w.locals {
		if len(parts) != len(w.locals) {
			errs[i] = fmt.Errorf("checkpoint: %s: parts of %d ranks: want one list for each of %d local ranks", op, len(parts), len(w.locals))
			continue
		}
		mine[i], errs[i] = describeParts(op, l.stream, parts[i])
		if ctx.Err() != nil {
			errs[i] = fmt.Errorf("checkpoint: %s: %w", op, context.Cause(ctx))
		}
	}
	by := make([][]partInfo, w.ranks)
	return by, agree(ctx, w, fmt.Sprintf("checkpoint: %s %s", op, folder), mine, errs, func(all []collective.Said[[]partInfo]) error {
		for rank, x := range all {
			by[rank] = x.Value
		}
		if err := firstFailed(w, op, all, errs); err != nil {
			return err
		}
		return checkDescriptions(op, folder, by)
	})
}

// checkDescriptions returns an error if a rank has described a part that cannot exist.
func checkDescriptions(op, folder string, by [][]partInfo) error {
	for rank, parts := range by {
		for i := range parts {
			if p := &parts[i]; !p.fits() || !fits(p.Stored, 1) || product(p.Stored) != p.Box.elements() {
				return fmt.Errorf("checkpoint: %s %s: rank %d describes a part of tensor %q that does not fit shape %v: %w", op, folder, rank, p.Name, p.Shape, comm.ErrMismatch)
			}
		}
	}
	return nil
}

// begin divides the work and allocates the memory of this process.
func (v *Saver) begin(ctx context.Context, w *peers, by [][]partInfo, parts [][]Part) error {
	err := v.prepare(w, by, parts)
	if err != nil {
		err = fmt.Errorf("checkpoint: new saver: %s: %w", v.folder, err)
	}
	errs := make([]error, len(w.locals))
	errs[0] = err
	if err := w.agree(ctx, "new saver", v.folder, errs, ""); err != nil {
		return err
	}
	v.nonce = strings.ToLower(rand.Text())
	if !w.remote() {
		return nil
	}
	long, cancel := messageContext(ctx)
	defer cancel()
	if err := comm.BroadcastValue(long, w.group, 0, &v.nonce, nil); err != nil {
		return fmt.Errorf("checkpoint: new saver %s: %w", v.folder, err)
	}
	if !isNonce(v.nonce) {
		return fmt.Errorf("checkpoint: new saver %s: rank 0 has sent another name than one for its saves: %w", v.folder, comm.ErrMismatch)
	}
	return nil
}

// isNonce reports whether a text consists of lower-case letters and digits, so that it is a part of a file's name.
func isNonce(text string) bool {
	return text != "" && len(text) <= 64 && !strings.ContainsFunc(text, func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') })
}

func (v *Saver) prepare(w *peers, by [][]partInfo, parts [][]Part) (err error) {
	if v.cfg.KeepLast < 0 || v.cfg.KeepEvery < 0 || v.cfg.HostBytes < 0 || v.cfg.Timeout < 0 {
		return errors.New("a number of the configuration is negative")
	}
	if v.plan, err = assignWriters(by); err != nil {
		return err
	}
	headers, starts, err := v.plan.lay()
	if err != nil {
		return err
	}
	if len(headers) == 0 {
		return errors.New("no rank has a part: there is nothing to save")
	}
	for i, l := range w.locals {
		s, err := newSnapshotter(i, l, v.plan, headers, starts, parts[i], v.cfg.HostBytes/int64(len(w.locals)))
		v.locals = append(v.locals, s)
		if err != nil {
			return err
		}
	}
	if !v.root {
		return nil
	}
	if err := v.fs.MkdirAll(v.folder); err != nil {
		return err
	}
	if v.fence != nil {
		if err := v.fence.claim(v.fs, v.folder, strings.ToLower(rand.Text())); err != nil {
			return err
		}
	}
	return removeLeftovers(v.fs, v.folder)
}

// Save saves the parts as they are after the work that is now on streams, one for each local
// rank. Work that is enqueued on the streams later waits until the snapshot is in host memory,
// and for nothing else. Save returns when the copies are enqueued, and other goroutines write
// the files; if HostBytes is less than this process writes, Save returns when all bytes have
// room. values are encoded as JSON: none, or one for each local rank.
//
// The checkpoint becomes visible when all ranks have written their files to the disk. A
// checkpoint of the same step is replaced. If the previous save has failed, Save returns that
// error, and begins this save all the same. If Save refuses to save on one rank, because of its
// arguments or with ErrBusy, the save ends on the other ranks with the reason. Collective.
func (v *Saver) Save(ctx context.Context, step int64, streams []*stream.Stream, values ...any) error {
	if err := v.check("save"); err != nil {
		return err
	}
	job, previous, err := v.start(ctx, step, streams, values)
	if previous != nil {
		previous = fmt.Errorf("checkpoint: save step %d to %s: the previous save: %w", step, v.folder, previous)
	}
	if err != nil {
		if job != nil {
			err = errors.Join(err, v.decline(job, err))
		}
		return errors.Join(previous, fmt.Errorf("checkpoint: save step %d to %s: %w", step, v.folder, err))
	}
	errs := make([]error, len(v.locals))
	var files sync.WaitGroup
	for i, l := range v.locals {
		files.Go(func() { errs[i] = v.writeFile(job, l) })
	}
	var all sync.WaitGroup
	snaps := make([]error, len(v.locals))
	for i, l := range v.locals {
		all.Go(func() { snaps[i] = l.snapshot(ctx, streams[i]) })
	}
	all.Wait()
	go func() {
		files.Wait()
		v.finish(job, errs)
	}()
	if err := errors.Join(snaps...); err != nil {
		return errors.Join(previous, fmt.Errorf("checkpoint: save step %d to %s: %w", step, v.folder, err))
	}
	return previous
}

// start begins a save and waits for the previous one. The saves of all ranks have the same
// numbers, also if a rank refuses one: then start returns the job with the error.
func (v *Saver) start(ctx context.Context, step int64, streams []*stream.Stream, values []any) (job *saveJob, previous, err error) {
	v.mu.Lock()
	closed := v.closed
	v.mu.Unlock()
	if closed {
		return nil, nil, fmt.Errorf("the saver: %w", device.ErrClosed)
	}
	job = &saveJob{step: step, fence: v.fence, done: make(chan struct{}), values: make([]json.RawMessage, len(v.locals))}
	v.saves++
	job.id = fmt.Sprintf("%s-%d", v.nonce, v.saves)
	job.temp = filepath.Join(v.unfinished(), tempPrefix+stepName(step)+"-"+job.id)
	if err := v.fill(job, streams, values); err != nil {
		return job, nil, err
	}
	if v.cfg.Refuse && !v.idle() {
		return job, nil, ErrBusy
	}
	if previous, err = v.wait(ctx); err != nil {
		return job, previous, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.last = job
	return job, previous, nil
}

// fill checks the arguments of a save, and encodes the values.
func (v *Saver) fill(job *saveJob, streams []*stream.Stream, values []any) error {
	if job.step < 0 || len(streams) != len(v.locals) || len(values) != 0 && len(values) != len(v.locals) {
		return fmt.Errorf("%d streams and %d values: want a step of 0 or more, a stream for each of %d local ranks, and as many values or none", len(streams), len(values), len(v.locals))
	}
	for i, x := range values {
		text, err := json.Marshal(x)
		if err != nil {
			return fmt.Errorf("value %d as JSON: %w", i, err)
		}
		job.values[i] = text
	}
	for i, l := range v.locals {
		if err := l.check(streams[i]); err != nil {
			return err
		}
		job.total += l.size
	}
	return nil
}

func (v *Saver) idle() bool {
	p := v.Progress()
	return p.Complete || p.Total == 0
}

// Wait waits for the last save, and returns its error once.
func (v *Saver) Wait(ctx context.Context) error {
	if err := v.check("wait for the save"); err != nil {
		return err
	}
	failed, err := v.wait(ctx)
	if failed == nil && err != nil {
		return fmt.Errorf("checkpoint: wait for the save to %s: %w", v.folder, err)
	}
	return failed
}

// check returns an error if v is no saver of NewSaver.
func (v *Saver) check(op string) error {
	if v == nil || v.plan == nil {
		return fmt.Errorf("checkpoint: %s: no saver given", op)
	}
	return nil
}

// wait waits for the last save, and returns its error once as failed. If ctx
// ends first, err is its cause.
func (v *Saver) wait(ctx context.Context) (failed, err error) {
	v.mu.Lock()
	job := v.last
	v.mu.Unlock()
	if job != nil {
		select {
		case <-job.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	failed, v.pending = v.pending, nil
	return failed, nil
}

// Progress returns how far the last save of this process is.
func (v *Saver) Progress() Progress {
	if v == nil {
		return Progress{}
	}
	v.mu.Lock()
	job := v.last
	v.mu.Unlock()
	if job == nil {
		return Progress{}
	}
	p := Progress{Step: job.step, Done: job.moved.Load(), Total: job.total}
	select {
	case <-job.done:
		p.Complete = true
	default:
	}
	return p
}

// Close waits for the last save, returns its error, and frees the memory of snapshots. It is
// idempotent and safe on nil.
func (v *Saver) Close() error {
	if v == nil || v.plan == nil {
		return nil
	}
	err := v.Wait(context.Background())
	v.mu.Lock()
	was := v.closed
	v.closed = true
	v.mu.Unlock()
	if was {
		return nil
	}
	return errors.Join(err, v.release())
}

func (v *Saver) release() error {
	var errs []error
	for _, l := range v.locals {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// assignWriters decides which rank writes which of the parts, which are given
// by rank, and which together must be whole tensors. A part that several ranks
// have goes to the one that writes the fewest bytes so far, the largest parts
// first, which all ranks compute alike.
func assignWriters(by [][]partInfo) (*manifest, error) {
	m := &manifest{Version: manifestVersion, Ranks: len(by), Block: blockBytes}
	names := map[string]int{}
	var offers []offer
	for rank, parts := range by {
		for _, p := range parts {
			i, ok := names[p.Name]
			if !ok {
				i = len(m.Tensors)
				names[p.Name] = i
				m.Tensors = append(m.Tensors, savedTensor{Name: p.Name, DType: p.Format.String(), Shape: p.Shape, Rows: 1, Width: p.Box.Rows * p.Box.Width})
			}
			t := &m.Tensors[i]
			if t.DType != p.Format.String() || !slices.Equal(t.Shape, p.Shape) {
				return nil, fmt.Errorf("tensor %q is %s %v on rank %d, and %s %v on another: want the same", p.Name, p.Format, p.Shape, rank, t.DType, t.Shape)
			}
			if !p.whole() {
				t.Rows, t.Width = p.Box.Rows, p.Box.Width
			}
			offers = append(offers, offer{p, rank, i})
		}
	}
	if err := m.assign(offers); err != nil {
		return nil, err
	}
	for i := range m.Tensors {
		if err := m.Tensors[i].check(); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(m.Tensors, func(a, b savedTensor) int { return cmp.Compare(a.Name, b.Name) })
	return m, nil
}

// An offer is a part that a rank could write.
type offer struct {
	partInfo
	rank, tensor int
}

// assign chooses a rank for each part.
func (m *manifest) assign(offers []offer) error {
	slices.SortStableFunc(offers, func(a, b offer) int {
		return cmp.Or(cmp.Compare(b.bytes(), a.bytes()), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Box.Start, b.Box.Start), cmp.Compare(a.Box.Len, b.Box.Len))
	})
	load := make([]int64, m.Ranks)
	for i := 0; i < len(offers); {
		first, best := offers[i], offers[i].rank
		for ; i < len(offers) && offers[i].tensor == first.tensor && offers[i].Box == first.Box; i++ {
			if r := offers[i].rank; load[r] < load[best] {
				best = r
			}
		}
		t := &m.Tensors[first.tensor]
		if first.Box.Len == 0 && product(t.Shape) > 0 {
			continue // a rank without elements
		}
		p := savedPart{Key: first.Name, Start: first.Box.Start, Len: first.Box.Len, rank: best, stored: first.Stored, info: first.partInfo}
		if first.whole() {
			p.Len, p.stored = t.Width, t.Shape
		} else {
			if t.Rows != first.Box.Rows || t.Width != first.Box.Width {
				return fmt.Errorf("tensor %q is cut along different dimensions by different ranks: want one", first.Name)
			}
			p.Key = fmt.Sprintf("%s@%d", first.Name, first.Box.Start)
		}
		load[best] += first.bytes()
		t.Parts = append(t.Parts, p)
	}
	return nil
}

// lay gives each writing rank its file, and returns the headers by file.
func (m *manifest) lay() (headers []*safetensors.Header, starts [][]byte, err error) {
	at := make([]int, m.Ranks)
	lists := make([][]safetensors.Tensor, m.Ranks)
	keys := map[string]bool{}
	for i := range m.Tensors {
		for _, p := range m.Tensors[i].Parts {
			if keys[p.Key] {
				return nil, nil, fmt.Errorf("tensor %q would be in the files twice: rename it", p.Key)
			}
			keys[p.Key] = true
			lists[p.rank] = append(lists[p.rank], safetensors.Tensor{Name: p.Key, DType: p.info.Format, Shape: p.stored})
		}
	}
	for rank, list := range lists {
		if len(list) == 0 {
			continue
		}
		h, start, err := safetensors.NewHeader(list, map[string]string{"format": "pt"})
		if err != nil {
			return nil, nil, err
		}
		at[rank] = len(m.Files)
		m.Files = append(m.Files, savedFile{Name: fmt.Sprintf("rank-%05d.safetensors", rank), Bytes: h.Size, rank: rank})
		headers, starts = append(headers, h), append(starts, start)
	}
	for i := range m.Tensors {
		for j := range m.Tensors[i].Parts {
			m.Tensors[i].Parts[j].File = at[m.Tensors[i].Parts[j].rank]
		}
	}
	return headers, starts, nil
}

// A fence says which run and epoch of a job saves, so that processes of an earlier epoch, which may run
// on after the job has gone on without them, replace nothing.
//
// Each epoch has a folder of its own for saves that are not complete. The first thing that a Saver does is to
// rename the folders of earlier epochs. A save of an earlier epoch can then not give its folder a name, because
// the rename of a path that does not exist fails. There is no comparison that another process could overtake, and no lock.
type fence struct {
	Job   string `json:"job"`
	Run   string `json:"run"` // each start of the job has another one
	Term  uint64 `json:"term"`
	Epoch uint64 `json:"epoch"`
}

// A fencer is a membership of package cluster.
type fencer interface {
	Job() string
	Fence() (run string, term, epoch uint64)
}

// fenceOf returns the fence of a group, or nil if it was not joined in a job.
func fenceOf(g *comm.Group) *fence {
	r, ok := route.GroupOf(g).Rendezvous().(fencer)
	if !ok {
		return nil
	}
	f := &fence{Job: r.Job()}
	if f.Run, f.Term, f.Epoch = r.Fence(); f.Run == "" {
		return nil
	}
	return f
}

// earlier reports whether f is an earlier epoch of o's run.
func (f *fence) earlier(o *fence) bool {
	return f.Run == o.Run && (f.Epoch < o.Epoch || f.Epoch == o.Epoch && f.Term < o.Term)
}

// fencePrefix begins the names of the folders of epochs.
const fencePrefix = tempPrefix + "epoch-"

// name returns the name of the folder of an epoch.
func (f *fence) name() string {
	run := sha256.Sum256([]byte(f.Job + "\x00" + f.Run))
	return fmt.Sprintf("%s%s-%d-%d", fencePrefix, hex.EncodeToString(run[:8]), f.Epoch, f.Term)
}

// parse reads the name of the folder of another epoch. Its run is f's, or "" for another run.
func (f *fence) parse(name string) (o fence, ok bool) {
	rest, ok := strings.CutPrefix(name, fencePrefix)
	if !ok {
		return o, false
	}
	run, rest, _ := strings.Cut(rest, "-")
	if n, err := fmt.Sscanf(rest, "%d-%d", &o.Epoch, &o.Term); n != 2 || err != nil {
		return o, false
	}
	if mine, _, _ := strings.Cut(strings.TrimPrefix(f.name(), fencePrefix), "-"); mine == run {
		o.Run = f.Run
	}
	return o, true
}

// claim creates the folder of this epoch, and then ends the saves of earlier epochs and of other runs.
func (f *fence) claim(files fileSystem, folder, nonce string) error {
	own := filepath.Join(folder, f.name())
	if err := files.Mkdir(own); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		o, ok := f.parse(e.Name())
		if ok && f.earlier(&o) {
			return errors.Join(fmt.Errorf("epoch %d of the job saves to this folder, and this process is in epoch %d", o.Epoch, f.Epoch), files.RemoveAll(own))
		}
	}
	for _, e := range entries {
		if o, ok := f.parse(e.Name()); !ok || o == (fence{Run: f.Run, Term: f.Term, Epoch: f.Epoch}) {
			continue
		}
		over := filepath.Join(folder, tempPrefix+stepPrefix+"over-"+nonce+strings.TrimPrefix(e.Name(), fencePrefix))
		if err := files.Rename(filepath.Join(folder, e.Name()), over); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := files.RemoveAll(over); err != nil {
			return err
		}
	}
	return nil
}

// unfinished returns the folder for saves that are not complete.
func (v *Saver) unfinished() string {
	if v.fence == nil {
		return v.folder
	}
	return filepath.Join(v.folder, v.fence.name())
}

// makeTemp creates the folder of a save, but not the folder of the epoch, which a later epoch may have renamed.
func (job *saveJob) makeTemp(files fileSystem) error {
	if job.fence == nil {
		return files.MkdirAll(job.temp)
	}
	err := files.Mkdir(job.temp)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// fenced explains the error of a save that a later epoch of the job, or another run, has ended.
func (v *Saver) fenced(err error) error {
	if err == nil || v.fence == nil || exists(v.unfinished()) {
		return err
	}
	return fmt.Errorf("epoch %d of job %q does not save to this folder any more: a later epoch or another run of the job has begun to: %w", v.fence.Epoch, v.fence.Job, err)
}
