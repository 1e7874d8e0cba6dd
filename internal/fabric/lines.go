package fabric

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Supports returns why r does not support an algorithm, the same on all ranks,
// or nil. The reason is an error that matches errors.ErrUnsupported.
func (r *Rank) Supports(a Algorithm) error {
	if a != TwoShotLines || r.noLines == "" {
		return nil
	}
	return &device.UnsupportedError{Feature: a.String(), Need: "GPUs that NVLink joins, which keeps lines of 128 bytes whole", Have: r.noLines}
}

// missesLines returns the reason why lines between this rank and the others may be torn,
// according to the driver, or "" if they arrive whole.
func (r *Rank) missesLines(infos []rankInfo) (string, error) {
	p, err := r.dev.Properties()
	if err != nil {
		return "", err
	}
	if !keepsLines(p.Major, p.Minor) {
		return fmt.Sprintf("compute capability %d.%d on rank %d, and not 7.0, 8.0 or from 9.0 on", p.Major, p.Minor, r.rank), nil
	}
	for i := range infos {
		if i == r.rank || infos[i].GPU == infos[r.rank].GPU {
			continue
		}
		peer := r.seen(&infos[i])
		if peer == nil {
			return fmt.Sprintf("a link between ranks %d and %d that the driver does not tell of, since the process of rank %[1]d does not see the other GPU", r.rank, i), nil
		}
		if atomics, err := r.dev.PeerAtomics(peer); err != nil || !atomics {
			return fmt.Sprintf("another link between ranks %d and %d", r.rank, i), err
		}
	}
	return "", nil
}

// keepsLines reports whether GPUs of a compute capability write lines
// atomically, which NCCL relies on for the same GPUs.
func keepsLines(major, minor int) bool { return major >= 9 || major >= 7 && minor == 0 }

// firstOf returns the first non-empty string.
func firstOf(said []string) string {
	for _, s := range said {
		if s != "" {
			return s
		}
	}
	return ""
}

// A line is the data of a line; its mark is sent after it.
type line [lineWords]uint64

const lineStep = lineBytes / 8 // words of memory

// enterLines is enter for an operation by lines, which use separate memory.
func enterLines(c *kernel.Call) *party {
	p := enter(c)
	p.set += 2
	return p
}

func (p *party) lineMark() uint64 { return p.epoch + p.signature }

// lineOf returns the i-th line of b.
//
//go:norace
func lineOf(b []byte, i int) (v line) {
	for j := range v {
		v[j] = wordOf(b, i*lineWords+j)
	}
	return v
}

//go:norace
func setLine(b []byte, i int, v *line) {
	for j, word := range v {
		setWord(b, i*lineWords+j, word)
	}
}

// sendLine sends the i-th line, whose mark shows that the rest has arrived.
//
//go:norace
func (p *party) sendLine(to []uint64, i int, v *line) {
	if p.over {
		return
	}
	to = to[i*lineStep:][:lineStep]
	*(*line)(to) = *v
	atomic.StoreUint64(&to[lineWords], p.lineMark())
}

// receiveLine waits for the i-th line.
//
//go:norace
func (p *party) receiveLine(in []uint64, i int) (v line) {
	in = in[i*lineStep:][:lineStep]
	mark := p.lineMark()
	if atomic.LoadUint64(&in[lineWords]) != mark {
		p.await(func() bool { return atomic.LoadUint64(&in[lineWords]) == mark })
	}
	if !p.over { // else the sender may still write
		v = *(*line)(in)
	}
	return v
}

// reduceLine is reduce for the i-th lines.
//
//go:norace
func (p *party) reduceLine(f fold, i int, own line) (sum line) {
	var lines [maxRanks]line
	for r := range p.ranks {
		if lines[r] = own; r != p.rank {
			lines[r] = p.receiveLine(p.from(0, r), i)
		}
	}
	for j := range sum {
		for r := range p.ranks {
			p.words[r] = lines[r][j]
		}
		sum[j] = f(p.words[:p.ranks])
	}
	return sum
}

func (f fold) twoShotLines(c *kernel.Call) {
	p := enterLines(c)
	in, out := p.read(0, p.bytes), p.write(0, p.bytes)
	share := over(over(wordsIn(p.bytes), lineWords), p.ranks)
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i := range share {
			v := lineOf(in, p.after(k)*share+i)
			p.sendLine(to, i, &v)
		}
	}
	for i := range share {
		at := p.rank*share + i
		v := p.reduceLine(f, i, lineOf(in, at))
		for k := 1; k < p.ranks; k++ {
			p.sendLine(p.gathered(k), at, &v)
		}
		setLine(out, at, &v)
	}
	for k := 1; k < p.ranks; k++ {
		for i := range share {
			at := p.after(k)*share + i
			v := p.receiveLine(p.gathered(0), at)
			setLine(out, at, &v)
		}
	}
	p.leave()
}

// The number of trials, the maximum number of elements, and a timeout, which only ends a
// hang.
const (
	lineTrials     = 8
	trialElements  = 16 << 10
	lineTrialLimit = time.Minute
)

// tryLines runs all-reduces by lines on all ranks, if nothing forbids it, and compares the
// results. If lines are torn on one rank, no rank uses them. A torn line has data of the
// operation before the last one, or zeros. Each group of eight threads handles at most one
// line of each part, as in all operations except the largest.
func (r *Rank) tryLines(ctx context.Context, s *stream.Stream, exchange collective.Exchange) (err error) {
	if r.ranks == 1 || r.noLines != "" {
		return nil
	}
	x, failed := r.newTrial(s)
	defer func() { err = errors.Join(err, x.close()) }()
	if _, err := collective.Agree(ctx, exchange, r.ranks, true, failed); err != nil {
		return err // a rank without memory would keep the others waiting
	}
	torn, failed := r.try(ctx, s, x)
	said, err := collective.Agree(ctx, exchange, r.ranks, torn, failed)
	if err != nil {
		return err
	}
	if r.noLines = firstOf(said); r.noLines != "" {
		slog.Warn("chorus: lines of 128 bytes arrive torn, so own all-reduces go without them", "rank", r.String(), "found", r.noLines)
	}
	return nil
}

// A trial is the memory of the all-reduces of tryLines. Its host memory is page-locked: with pageable
// memory, eight ranks of one process on one GPU wait for each other in the driver.
type trial struct {
	x       memory.Slice[float32]
	in, out *memory.Pinned[float32]
}

func (r *Rank) newTrial(s *stream.Stream) (x trial, err error) {
	n := min(r.Limits().TwoShotLines/4, trialElements)
	if x.x, err = memory.Make[float32](s, n); err != nil {
		return x, err
	}
	if x.in, err = memory.MakePinned[float32](r.dev, n); err != nil {
		return x, err
	}
	x.out, err = memory.MakePinned[float32](r.dev, n)
	return x, err
}

func (x *trial) close() error { return errors.Join(x.x.Close(), x.in.Close(), x.out.Close()) }

// try runs several all-reduces of x, each with different data, and describes wrong
// results. The end of the context aborts the rank.
func (r *Rank) try(ctx context.Context, s *stream.Stream, x trial) (torn string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lineTrialLimit, errors.New("the other ranks did not send their lines within a minute"))
	defer cancel()
	stop := context.AfterFunc(ctx, r.Abort)
	defer func() {
		if !stop() {
			err = errors.Join(context.Cause(ctx), err)
		}
	}()
	for k := range lineTrials {
		for i := range x.in.Data() {
			x.in.Data()[i] = trialValue(k, r.rank, i)
		}
		o := operation{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Float32, N: x.x.Len()}, Stream: s}, Algorithm: int8(TwoShotLines), Dst: collective.OperandOf(x.x), Src: collective.OperandOf(x.x)}
		err := errors.Join(x.x.CopyFromPinned(s, x.in), r.enqueue(&o), x.x.CopyToPinned(s, x.out), s.Sync(context.WithoutCancel(ctx)))
		if err != nil {
			return "", err
		}
		if torn == "" {
			torn = r.tornIn(x.out.Data(), k)
		}
	}
	return torn, nil
}

// tornIn describes a wrong sum, or returns "".
func (r *Rank) tornIn(out []float32, trial int) string {
	for i, have := range out {
		want := float32(0)
		for rank := range r.ranks {
			want += trialValue(trial, rank, i)
		}
		if have != want {
			return fmt.Sprintf("lines that come torn: element %d of trial %d is %g on rank %d: want %g", i, trial, have, r.rank, want)
		}
	}
	return ""
}

// trialValue is the i-th number of a rank in a trial: an integer, so that sums are exact,
// and different in each trial.
func trialValue(trial, rank, i int) float32 { return float32(1 + (i*7+rank*13+trial*101)%1021) }

// probeWords is the size of the pattern for each rank.
const probeWords = unitBytes / 8

// probePlace returns the part of a rank's memory that another rank sends its pattern to.
func (r *Rank) probePlace(words memory.Slice[uint64], from int) memory.Slice[uint64] {
	return words.Slice(signalBytes/8+from*r.slot/8, signalBytes/8+from*r.slot/8+probeWords)
}

// probePattern is the data that a rank sends to another one: no zeros, and no repetitions.
func probePattern(from, to int) []uint64 {
	words := make([]uint64, probeWords)
	for i := range words {
		words[i] = scramble(uint64(from)<<48|uint64(to)<<40|uint64(i)) | 1
	}
	return words
}

// probe sends a pattern to all other ranks, from the part of its memory that no other rank
// writes to. On some machines the driver maps the memory of another GPU, but an IOMMU
// corrupts the data. After all ranks have sent theirs, probed compares it.
func (r *Rank) probe(ctx context.Context, s *stream.Stream) error {
	own := r.probePlace(r.peers[0].words, r.rank)
	for k := 1; k < r.ranks; k++ {
		if err := own.CopyFrom(s, probePattern(r.rank, (r.rank+k)%r.ranks)); err != nil {
			return err
		}
		if err := memory.Copy(s, r.probePlace(r.peers[k].words, r.rank), own); err != nil {
			return err
		}
	}
	return s.Sync(ctx)
}

// probed compares the received patterns and clears them, but trusts the driver
// with CHORUS_P2P=force.
func (r *Rank) probed(ctx context.Context, s *stream.Stream) error {
	got := make([]uint64, probeWords)
	for from := range r.ranks {
		place := r.probePlace(r.peers[0].words, from)
		if err := place.CopyTo(s, got); err != nil {
			return err
		}
		if err := place.Zero(s); err != nil {
			return err
		}
		if from != r.rank && !slices.Equal(got, probePattern(from, r.rank)) && env.P2P.Value() != "force" {
			slog.Warn("chorus: data that one GPU writes to the memory of another GPU arrives corrupted, so Chorus kernels are not used; "+
				"an IOMMU or ACS is the usual cause, and NCCL may need NCCL_P2P_DISABLE=1", "from rank", from, "to", r.String())
			return unsupported("GPUs that can write to each other's memory", fmt.Sprintf("corrupted data from rank %d on %s", from, r.dev))
		}
	}
	return s.Sync(ctx)
}
