package fabric

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// A pusher is what a rank of Config.Pushes has besides its scratch memory.
//
// An all-reduce by Pushed takes no multiprocessor while it waits or moves data. Copy engines push each share to its rank,
// and then a mark to a flag of the rank. The rank's stream waits for the marks of all others and resets them,
// a Fold adds the shares, and copy engines push the results in the same way. The results of the others are copied to the output.
//
// Flags and slots need no numbers of operations, so graphs can have the same addresses at each launch. For no rank pushes
// the next operation's data before it has the results of all ranks, and these have then read, and reset, everything of this one.
//
// Copies cannot be taken back: those that are enqueued when a rank is aborted still write to the memory of the other ranks. These accept none of
// it, and memory that a closed rank had stays until the ranks of other processes have closed, too, or their processes have ended.
type pusher struct {
	flags *flagPage
	// sides are the streams of the copy engines: the first one for operations outside graphs, and one for each capture at a time,
	// which keeps it until it ends. The rank's Sequence serializes their uses.
	sides []*stream.Stream

	here *presence
	far  []int // ranks of other processes

	stop     chan struct{} // closed to end the releases of an aborted rank
	released chan struct{} // closed when they have ended; nil if the rank was not aborted
}

// mostPerGPU is the number of ranks of a group that may share a GPU: each holds two hardware queues while it waits, of eight.
const mostPerGPU = 2

// compareQueues returns an error, the same on all ranks, if too many ranks share a GPU.
func compareQueues(infos []rankInfo) error {
	ranks := map[string]int{}
	for i := range infos {
		if ranks[infos[i].GPU]++; ranks[infos[i].GPU] > mostPerGPU {
			return unsupported(fmt.Sprintf("at most %d ranks on a GPU", mostPerGPU), "more, whose waits would occupy the hardware queues")
		}
	}
	return nil
}

// open opens the page of flags that rank 0 has made, makes the streams, and tests whether the device's streams can use flags.
func (p *pusher) open(ctx context.Context, r *Rank, s *stream.Stream, infos []rankInfo) (err error) {
	if r.rank > 0 {
		if p.flags, err = openFlagPage(r.dev, infos[0].Flags); err != nil {
			return err
		}
	}
	for i := range infos {
		if infos[i].Process != infos[r.rank].Process {
			p.far = append(p.far, i)
		}
	}
	if p.here, err = p.flags.enter(r.rank); err != nil {
		return err
	}
	side, err := stream.New(r.dev, nil)
	if err != nil {
		return err
	}
	p.sides = append(p.sides, side)
	own := r.peers[0].words
	if err := gpu.StreamOf(s).Share(own.Ptr(), own.Bytes()); err != nil {
		return err
	}
	atomic.StoreUint32(p.flags.flag(r.rank, clearFlag), 1)
	at := p.flags.at(r.rank, testFlag)
	err = batch(gpu.StreamOf(s), cudadrv.StreamMemOp{At: at, Value: 3}, cudadrv.StreamMemOp{At: at, Value: 2, Waits: true}, cudadrv.StreamMemOp{At: at, Value: 4})
	if err == nil {
		err = s.Sync(ctx)
	}
	if err == nil && atomic.LoadUint32(p.flags.flag(r.rank, testFlag)) != 4 {
		err = errors.New("a flag has another value than was written")
	}
	if err != nil && r.dev.Err() == nil && ctx.Err() == nil {
		return unsupported("streams that wait for flags in host memory", err.Error())
	}
	return err
}

// close frees what the pusher has, after the rank's last operation.
func (p *pusher) close(r *Rank) error {
	if p == nil {
		return nil
	}
	var errs []error
	for _, s := range p.sides {
		errs = append(errs, r.syncStream(gpu.StreamOf(s)), s.Close())
	}
	close(p.stop)
	if p.released != nil {
		<-p.released
	}
	errs = append(errs, p.flags.close(r.dev))
	if p.here != nil {
		errs = append(errs, p.here.leave())
		if p.watched() {
			go p.free(r.peers[0])
			r.peers = r.peers[1:]
		} else {
			errs = append(errs, p.here.file.Close())
		}
	}
	return errors.Join(errs...)
}

// watched reports whether a rank of another process may still write to the scratch memory of this one: copies that were enqueued before an
// abort go on.
func (p *pusher) watched() bool { return slices.ContainsFunc(p.far, p.here.sees) }

// free frees scratch memory as soon as no rank writes to it.
func (p *pusher) free(own *scratch) {
	for p.watched() {
		time.Sleep(freePause)
	}
	err := errors.Join(own.close(), p.here.file.Close())
	if err != nil && own.words.Device().Err() == nil {
		slog.Warn("chorus: scratch memory of a closed group could not be freed", "error", err)
	}
}

// freePause is the time between two looks at the other ranks.
const freePause = 20 * time.Millisecond

// The shortest and the longest time between two releases of an aborted rank's flags.
const (
	releaseFirst   = 20 * time.Microsecond
	releaseLongest = 10 * time.Millisecond
)

// abort ends all waits of the rank's streams, from now on until close. The other ranks do not accept the marks that the rank writes
// from now on.
func (p *pusher) abort(r *Rank) {
	if p.released != nil {
		return
	}
	p.released = make(chan struct{})
	p.flags.taint(r.ranks)
	go func() {
		defer close(p.released)
		for pause := releaseFirst; ; pause = min(2*pause, releaseLongest) {
			if p.flags.release(r.rank) {
				pause = releaseFirst
			}
			select {
			case <-p.stop:
				return
			case <-time.After(pause):
			}
		}
	}()
}

// enqueuePushed enqueues an all-reduce in pieces that the slots have room for.
func (r *Rank) enqueuePushed(o *operation) error {
	s := gpu.StreamOf(o.Stream)
	if _, err := foldKernel(r.dev, o.DType, o.Reduction, WholeStage); err != nil { // loading it waits for the device
		return err
	}
	if err := s.Captured(r); err != nil {
		return err
	}
	capture, err := s.CaptureID()
	if err != nil {
		return err
	}
	if err := r.order.Begin(s); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	side, err := r.pusher.side(r, capture)
	if err != nil {
		return err
	}
	x := pushing{Rank: r, o: o, s: s, side: side, signature: o.signature(Pushed)}
	x.dst, x.src = o.operands()
	for most := r.ranks * r.slot; x.at < o.bytes(); x.at += most {
		x.bytes = min(o.bytes()-x.at, most)
		if err := x.enqueue(); err != nil {
			return &collective.PartialError{Err: err}
		}
	}
	s.Uses("copies and kernel of "+o.Kind.String(), true, func() []cudadrv.Use { return o.uses(r) })
	return nil
}

// side returns the side stream for a capture, or for operations outside of captures, which have the number 0.
func (p *pusher) side(r *Rank, capture uint64) (*gpu.Stream, error) {
	if capture == 0 {
		return gpu.StreamOf(p.sides[0]), nil
	}
	for _, s := range p.sides[1:] {
		if id, err := gpu.StreamOf(s).CaptureID(); err == nil && (id == 0 || id == capture) {
			return gpu.StreamOf(s), nil
		}
	}
	s, err := stream.New(r.dev, nil)
	if err != nil {
		return nil, err
	}
	p.sides = append(p.sides, s)
	return gpu.StreamOf(s), nil
}

// A pushing is a piece of an all-reduce by Pushed.
type pushing struct {
	*Rank
	o         *operation
	s, side   *gpu.Stream // of the operation, and of the copies to other ranks
	signature uint64
	dst, src  uint64
	at, bytes int // the piece
}

// enqueue has its stream wait for the copies of each phase, too, before it waits for other ranks: they may share a hardware queue, which a wait
// for flags holds. So an output in place is also not written before it was read.
func (x *pushing) enqueue() error {
	err := x.send(0, func(to int) (uint64, int) { at, n := x.share(to); return x.src + at, n })
	if err == nil {
		err = x.await(0)
	}
	mine, n := x.share(x.rank)
	if err == nil && n > 0 {
		f := Fold{
			DType: x.o.DType, Op: x.o.Reduction, Block: x.ranks, Ranks: x.ranks, All: x.ranks, Count: n / x.o.DType.Size(),
			Base: x.slotAt(0, 0), Stride: uint64(x.slot), Mine: x.rank, Own: x.src + mine, Dst: x.dst + mine,
		}
		err = f.Enqueue(x.o.Stream)
	}
	if err == nil {
		err = x.send(1, func(int) (uint64, int) { return x.dst + mine, n })
	}
	if err == nil {
		err = x.await(1)
	}
	for k := 1; k < x.ranks && err == nil; k++ {
		from := (x.rank + k) % x.ranks
		at, n := x.share(from)
		err = x.copy(x.s, x.dst+at, x.slotAt(0, x.ranks+from), n)
	}
	return err
}

// send pushes on the side stream, after what is on the operation's stream and before what follows there.
func (x *pushing) send(phase int, what func(to int) (src uint64, n int)) error {
	if err := x.side.WaitStream(x.s); err != nil {
		return err
	}
	err := x.push(phase, what)
	return errors.Join(err, x.s.WaitStream(x.side)) // also after an error: a capture ends only if the side stream has joined
}

// share returns where the share of a rank is in an operand, and its size. Each
// share begins at a multiple of a cell.
func (x *pushing) share(rank int) (at uint64, n int) {
	most := over(over(x.bytes, cellBytes), x.ranks) * cellBytes
	first := min(rank*most, x.bytes)
	return uint64(x.at + first), min(most, x.bytes-first)
}

// slotAt returns the address of a slot in the memory of the k-th rank after
// this one, where the slots for results follow those for shares.
func (x *pushing) slotAt(k, slot int) uint64 {
	return x.peers[k].words.Ptr() + signalBytes + uint64(slot*x.slot)
}

// push enqueues the copies of a phase to all other ranks, with a mark behind each.
func (x *pushing) push(phase int, what func(to int) (src uint64, n int)) error {
	for k := 1; k < x.ranks; k++ {
		to := (x.rank + k) % x.ranks
		src, n := what(to)
		if err := x.copy(x.side, x.slotAt(k, phase*x.ranks+x.rank), src, n); err != nil {
			return err
		}
		low, high := x.mark(phase)
		if err := batch(x.side, cudadrv.StreamMemOp{At: x.pusher.flags.at(to, arrivalFlag(phase, x.rank)), Value: low | high}); err != nil {
			return err
		}
	}
	return nil
}

// await enqueues a wait for the marks of all other ranks in a phase, and resets them.
func (x *pushing) await(phase int) error {
	var waits, resets []cudadrv.StreamMemOp
	low, high := x.mark(phase)
	for k := 1; k < x.ranks; k++ {
		at := x.pusher.flags.at(x.rank, arrivalFlag(phase, (x.rank+k)%x.ranks))
		waits = append(waits, cudadrv.StreamMemOp{At: at, Value: low, Waits: true}, cudadrv.StreamMemOp{At: at, Value: high, Waits: true})
		resets = append(resets, cudadrv.StreamMemOp{At: at})
	}
	waits = append(waits, cudadrv.StreamMemOp{At: x.pusher.flags.at(x.rank, clearFlag), Value: 1, Waits: true})
	return batch(x.s, append(waits, resets...)...)
}

// mark returns the bits that a flag has when the data of a phase has arrived: one of the lower half and one of the upper half, which depend on the
// operation. A stream can wait for several bits only one after the other, and each wait takes a microsecond. So of 256 pairs
// of operations that differ one has the same marks in a phase, and of 65536 one in both.
func (x *pushing) mark(phase int) (low, high uint32) {
	bits := x.signature >> (8 * phase)
	return 1 << (bits % 16), 1 << (16 + bits/16%16)
}

func (x *pushing) copy(s *gpu.Stream, dst, src uint64, bytes int) error {
	if bytes == 0 {
		return nil
	}
	return gpu.DeviceOf(x.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoDAsync(cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src), uintptr(bytes), s.Raw())
	})
}

// batch enqueues operations on words of memory.
func batch(s *gpu.Stream, ops ...cudadrv.StreamMemOp) error {
	return s.Device().Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamBatchMemOp(s.Raw(), ops) })
}
