package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
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
	// HostBytes is the most pinned host memory of a process for snapshots. 0 is as much as
	// the process writes. If there is less, Save waits until files have taken the first bytes,
	// and training waits longer.
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

// NewSaver prepares saves of parts to folders step-00000100 within folder. parts has the parts
// of each local rank. The memory of the parts stays the same for all saves. The ranks exchange
// descriptions of their parts here, and not in Save. Together the parts must be whole tensors.
// If several ranks have the same part, the rank with the least work writes it. All processes
// must see the folder, and no other job may save to it. In a job of package cluster, NewSaver ends the saves of earlier
// epochs: a process that runs on in one cannot complete a save or remove a checkpoint any more. Collective.
func NewSaver(ctx context.Context, g *comm.Group, folder string, parts [][]Part, cfg *SaverConfig) (*Saver, error) {
	return newSaver(ctx, g, folder, parts, cfg, systemFiles{folder})
}

func newSaver(ctx context.Context, g *comm.Group, folder string, parts [][]Part, cfg *SaverConfig, fs fileSystem) (*Saver, error) {
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: new saver: %w", err)
	}
	v := &Saver{folder: folder, fs: fs, group: g, ranks: w.ranks, root: w.locals[0].rank == 0, fence: fenceOf(g)}
	if cfg != nil {
		v.cfg = *cfg
	}
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
	}
	if err := w.agree(ctx, op, folder, errs, ""); err != nil {
		return nil, err
	}
	if !w.remote() {
		return mine, nil
	}
	long, cancel := messageContext(ctx)
	defer cancel()
	by, err := comm.GatherValues(long, w.group, nil, mine...)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s %s: %w", op, folder, err)
	}
	return by, nil
}

// begin divides the work and allocates the memory of this process.
func (v *Saver) begin(ctx context.Context, w *peers, by [][]partInfo, parts [][]Part) error {
	err := v.prepare(w, by, parts)
	if err != nil {
		err = fmt.Errorf("checkpoint: new saver %s: %w", v.folder, err)
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
	return nil
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
		return nil, nil, device.ErrClosed
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
	failed, err := v.wait(ctx)
	return cmp.Or(failed, err)
}

// wait waits for the last save, and returns its error once. err is the end of ctx.
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
	if v == nil {
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
