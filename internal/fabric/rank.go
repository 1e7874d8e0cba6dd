// Package fabric has the Chorus kernels for collectives between the GPUs of one host, over
// memory that all these GPUs map. Most are for small sizes: an operation takes a few
// microseconds, less than the protocol of a general library. The pipelined ones are for large sizes.
//
// Open opens a rank of a group. Each rank has scratch memory that the other ranks write
// to. An operation is one kernel on each rank: it sends, waits for the data of the other
// ranks, and reduces it in rank order. All ranks get bitwise identical results. The host
// supplies only the addresses, the length and the signature, so graphs may capture
// operations and launch them between other operations.
//
// As with NCCL, all ranks must issue the same operations in the same order, with the same
// lengths, types and reductions. The data carries a signature of these properties. If ranks
// disagree, they wait for each other until they are aborted, and do not get a result (by Pushed, one of 65536 pairs of operations does). A
// rank's operations run one after the other, also on different streams and in graphs. While
// a rank waits for the others, its kernel occupies multiprocessors; Abort ends the wait.
package fabric

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// A Rank is a rank of a group that Open has made. Its operations may be enqueued by any
// goroutine; all ranks must issue them in the same order.
type Rank struct {
	owner       handle.Owner
	dev         *device.Device
	rank, ranks int
	slot, whole int    // bytes
	blocks      int    // the maximum for a kernel
	clusters    bool   // whether the device has clusters of thread blocks
	noLines     string // why TwoShotLines is not supported, the same on all ranks; "" if it is
	forced      grid   // for measurements

	peers   []*scratch // of the k-th rank after this one; the first is the rank's own
	control memory.Slice[uint64]
	host    *memory.Pinned[uint32] // the first word requests the abort, the second confirms it; 0 otherwise
	stop    atomic.Pointer[uint32] // the first word of host, until Close
	args    [signatureParam]kernel.Arg

	aborted atomic.Bool
	ending  sync.Mutex // held while host may be closed

	pusher *pusher // if the rank executes Pushed, and nothing else

	order gpu.Sequence // serializes the operations: one epoch after the other
}

// Rank returns the number of the rank in its group.
func (r *Rank) Rank() int { return r.rank }

// Ranks returns the number of ranks.
func (r *Rank) Ranks() int { return r.ranks }

// Device returns the rank's device.
func (r *Rank) Device() *device.Device { return r.dev }

// String returns the name of the rank in errors.
func (r *Rank) String() string { return fmt.Sprintf("rank %d of %d (%s)", r.rank, r.ranks, r.dev) }

// Abort ends the rank: operations that wait for other ranks end within milliseconds, and
// later ones are refused. The destinations of aborted operations are undefined. The other
// ranks are not informed, and wait until they are aborted too. Abort returns at once, may
// be called by any goroutine at any time, and is idempotent.
func (r *Rank) Abort() {
	if r != nil {
		r.abort(true)
	}
}

// abort is Abort, where pending says whether operations may not be complete.
func (r *Rank) abort(pending bool) {
	r.aborted.Store(true)
	r.ending.Lock()
	defer r.ending.Unlock()
	if stop := r.stop.Load(); stop != nil {
		atomic.StoreUint32(stop, 1)
		if r.pusher != nil && pending {
			r.pusher.abort(r)
		}
	}
}

// Err returns why the rank accepts no more operations, or nil: the error matches
// ErrAborted or device.ErrClosed. It says whether an operation was aborted so far, which
// is known once its stream has passed it.
func (r *Rank) Err() error {
	if r.owner.Closed() {
		return r.errorf("use", "%w", device.ErrClosed)
	}
	if !r.aborted.Load() {
		return nil
	}
	r.ending.Lock()
	defer r.ending.Unlock()
	if host := r.host.Data(); host != nil && atomic.LoadUint32(&host[1]) != 0 {
		return r.errorf("use", "an operation was given up: %w", ErrAborted)
	}
	return r.errorf("use", "%w", ErrAborted)
}

// Close aborts the rank, waits for the streams that had its operations, and frees its
// memory. Close the ranks of a group after all ranks have completed their operations: a
// rank that still waits for a closed one waits until it is aborted. Close is idempotent
// and accepts nil. It fails, and the rank stays open, while a graph has captured its
// operations, and while a stream that had operations is captured.
func (r *Rank) Close() error {
	if r == nil || r.owner.Closed() {
		return nil
	}
	open := true
	err := r.order.Close("fabric: close "+r.String(), func(users []*gpu.Stream) error {
		if open = r.owner.Close(); !open {
			return nil
		}
		r.abort(slices.ContainsFunc(users, func(s *gpu.Stream) bool {
			done, err := s.Query()
			return !done || err != nil
		}))
		var errs []error
		for _, s := range users {
			errs = append(errs, r.syncStream(s))
		}
		return errors.Join(errs...)
	})
	if !open || !r.owner.Closed() {
		return err
	}
	r.ending.Lock()
	defer r.ending.Unlock()
	r.stop.Store(nil)
	return errors.Join(err, r.free())
}

// syncStream waits for a stream, and ignores the error of a lost device, which
// uses no memory.
func (r *Rank) syncStream(s *gpu.Stream) error {
	err := gpu.DeviceOf(r.dev).SyncStream(s.Raw())
	if err != nil && r.dev.Err() == nil {
		return r.errorf("close", "%w", err)
	}
	return nil
}

// Hold records that a graph uses r. For Chorus's own packages.
func (r *Rank) Hold(g gpu.Holder) { r.order.Hold(g) }

// LetGo undoes Hold. For Chorus's own packages.
func (r *Rank) LetGo(g gpu.Holder) { r.order.LetGo(g) }

// Prepare records that a graph with operations of r is launched on s. For Chorus's own
// packages.
func (r *Rank) Prepare(s gpu.HasStream) error {
	if err := r.Err(); err != nil {
		return err
	}
	return r.order.Prepare(s)
}

// Launched ends what Prepare began. For Chorus's own packages.
func (r *Rank) Launched(s gpu.HasStream, err error) { r.order.Launched(s, err) }

var _ gpu.Preparer = (*Rank)(nil)

// Takes reports whether Enqueue supports the collective with an algorithm. Addresses do not matter, so the
// answer is the same on all ranks.
func (r *Rank) Takes(x *collective.Op, a Algorithm) bool {
	o := (*operation)(x)
	if !hasKernel[x.Kind] || o.reduces() && (formatOf[x.DType] < 0 || x.Reduction < 0 || x.Reduction >= collective.NumReductions) {
		return false
	}
	_, _, ok := o.fits(r, a)
	return ok && r.ranks > 1 && o.bytes() > 0
}

// Enqueue enqueues a collective on its stream, which is of the rank's device,
// with its Algorithm, and fails unless Takes returns true for it. Destination
// and source may be in place as in NCCL, except for AllToAlls, whose operands
// must not overlap. The source may be missing if the rank only receives.
func (r *Rank) Enqueue(x *collective.Op) error {
	if err := r.Err(); err != nil {
		return err
	}
	if !r.Takes(x, Algorithm(x.Algorithm)) {
		return r.errorf(x.Kind.Plain(), "%d elements of %s: there is no kernel for that", x.N, x.DType)
	}
	if err := r.enqueue((*operation)(x)); err != nil {
		return r.errorf(x.Kind.Plain(), "%w", err)
	}
	return nil
}

// An operation is a collective.Op that a Chorus kernel executes.
type operation collective.Op

// bytes returns the size of one rank's part.
func (o *operation) bytes() int { return o.N * o.DType.Size() }

// operands returns the addresses of the operands, which are the same for a rank
// that only receives and so has no source.
func (o *operation) operands() (dst, src uint64) {
	if dst, src = uint64(o.Dst.Ptr), uint64(o.Src.Ptr); src == 0 {
		src = dst
	}
	return dst, src
}

// hasKernel has the collectives that have Chorus kernels.
var hasKernel = [collective.NumKinds]bool{
	collective.AllReduce: true, collective.Broadcast: true, collective.AllGather: true, collective.ReduceScatter: true, collective.AllToAll: true,
}

func (o *operation) reduces() bool {
	return o.Kind == collective.AllReduce || o.Kind == collective.ReduceScatter
}

// fits returns the algorithm to use, chooses it if a is Auto, and reports whether there is room for the
// operation; most is the maximum size.
func (o *operation) fits(r *Rank, a Algorithm) (use Algorithm, most int, ok bool) {
	l, bytes := r.Limits(), o.bytes()
	most = l.Part
	switch {
	case (a == Pushed) != (r.pusher != nil), a == Pushed && o.Kind != collective.AllReduce:
		most = 0
	case a == Pushed, a == Pipelined && o.Kind != collective.Broadcast:
		most = math.MaxInt
	case o.Kind == collective.AllReduce:
		if a == Auto && bytes <= l.AllReduce() {
			a = r.choose(bytes)
		}
		most = l.of(a)
	}
	return a, most, r.ranks == 1 || bytes <= most
}

// enqueue launches the kernel.
func (r *Rank) enqueue(o *operation) error {
	a, _, _ := o.fits(r, Algorithm(o.Algorithm))
	if a == Pushed {
		return r.enqueuePushed(o)
	}
	k, g, err := o.kernel(r, a)
	if err != nil {
		return err
	}
	s := gpu.StreamOf(o.Stream)
	if err := s.Captured(r); err != nil {
		return err
	}
	dst, src := o.operands()
	var args [lastParam + 1]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Scalar(o.signature(a))
	args[inParam], args[outParam] = kernel.Address(src), kernel.Address(dst)
	args[bytesParam], args[alignedParam] = kernel.Scalar(uint64(o.bytes())), kernel.Scalar(o.aligned(a))
	n := lastParam
	switch {
	case o.Kind == collective.Broadcast:
		args[n] = kernel.Scalar(uint32(o.Root))
		n++
	case a == Pipelined:
		args[n] = kernel.Scalar(uint32(r.chunkCells(o)))
		n++
	}
	if err := r.order.Begin(s); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	if err := k.Launch(o.Stream, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args[:n]...); err != nil {
		return err
	}
	s.Uses("kernel of "+o.Kind.String(), r.ranks > 1, func() []cudadrv.Use { return o.uses(r) })
	return nil
}

// uses lists the operands of this rank, for the sanitizer.
func (o *operation) uses(r *Rank) []cudadrv.Use {
	in, out := 1, 1
	switch o.Kind {
	case collective.AllGather:
		out = r.ranks
	case collective.ReduceScatter:
		in = r.ranks
	case collective.AllToAll:
		in, out = r.ranks, r.ranks
	case collective.Broadcast:
		if in = 0; o.Root == r.rank {
			in = 1
		}
	}
	dst, src := o.operands()
	return []cudadrv.Use{{Ptr: cudadrv.DevicePtr(src), Bytes: uint64(in * o.bytes())}, {Ptr: cudadrv.DevicePtr(dst), Bytes: uint64(out * o.bytes()), Write: true}}
}

// kernel returns the kernel of the operation and its grid.
func (o *operation) kernel(r *Rank, a Algorithm) (k *kernel.Kernel, g grid, err error) {
	t := tools(r.dev, r.ranks)
	switch o.Kind {
	case collective.AllReduce:
		k, err = t.reducer(r.dev, allReduceFn+function(a)-1, formatOf[o.DType], o.Reduction)
	case collective.ReduceScatter:
		k, err = t.reducer(r.dev, pick(a, reduceScatterFn, longReduceScatterFn), formatOf[o.DType], o.Reduction)
	case collective.AllGather:
		k, err = t.mover(r.dev, pick(a, allGatherFn, longAllGatherFn))
	case collective.AllToAll:
		k, err = t.mover(r.dev, pick(a, allToAllFn, longAllToAllFn))
	case collective.Broadcast:
		k, err = t.mover(r.dev, broadcastFn)
	}
	if a == Pipelined {
		return k, r.chunkGrid(r.chunkCells(o)), err
	}
	return k, r.grid(a.steps(o.bytes(), r.ranks)), err
}

// pick returns the function of an algorithm.
func pick(a Algorithm, packets, chunks function) function {
	if a == Pipelined {
		return chunks
	}
	return packets
}

// chunkBytes is the size of the chunks of pipelined operations, of all ranks together, if the scratch memory has room for four.
const chunkBytes = 4 << 20

// chunkCells returns the number of cells of a rank's part of a chunk, such that
// the chunks are about equal.
func (r *Rank) chunkCells(o *operation) int {
	most := min(chunkBytes, r.whole/4) / r.ranks / cellBytes
	cells := over(o.bytes(), cellBytes)
	if o.Kind == collective.AllReduce {
		cells = over(cells, r.ranks)
	}
	return over(cells, over(cells, most))
}

// signature is a hash of all properties that must be the same on all ranks. Packets and
// signals carry it, so that a rank does not accept the data of another operation.
func (o *operation) signature(a Algorithm) uint64 {
	x := uint64(o.Kind) | uint64(a)<<8 | uint64(o.DType)<<16 | uint64(o.Root)<<32
	if o.reduces() {
		x |= uint64(o.Reduction) << 24
	}
	return scramble(scramble(x) + uint64(o.bytes()))
}

// scramble is a bijective hash of a number.
func scramble(x uint64) uint64 {
	x = (x ^ x>>30 + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// aligned is 1 if the rank's kernel may access several bytes of its operands at once. The
// other ranks' operands may be aligned differently, because the data on the links is the
// same.
func (o *operation) aligned(a Algorithm) uint32 {
	unit := uint64(8)
	dst, src := o.operands()
	bits := dst | src
	switch {
	case o.Kind == collective.AllReduce && (a == TwoShot || a == Pipelined):
		unit = 16
	case a == Pipelined:
		unit, bits = 16, bits|uint64(o.bytes())
	case o.Kind != collective.AllReduce && o.Kind != collective.Broadcast:
		bits |= uint64(o.bytes()) // the offset of each part
	}
	if bits%unit == 0 {
		return 1
	}
	return 0
}

// An Algorithm is an algorithm for all-reduces. Pipelined is also for other collectives.
type Algorithm int

// The algorithms. Packets are words of 8 bytes, sent as two halves with a mark each. The
// marks show that the data has arrived, so no other wait is necessary, but packets take
// twice the bytes.
const (
	Auto           Algorithm = iota // chosen by the numbers of bytes and ranks
	OneShot                         // each rank sends all its elements to all ranks, in packets
	TwoShotPackets                  // each rank reduces a part and sends the result to all ranks, in packets
	TwoShot                         // the same with plain bytes, between barriers
	TwoShotLines                    // the same in lines of 128 bytes with marks of 8 bytes; requires NVLink between all GPUs
	Pipelined                       // TwoShot in chunks, several at a time, and the same for other collectives; without a limit of the size
	algorithms

	// Pushed is TwoShot whose elements copy engines move, without a limit of the size: a kernel only adds. It needs a rank of
	// its own, with Config.Pushes.
	Pushed = algorithms
)

// String returns the name of the algorithm, such as "one-shot".
func (a Algorithm) String() string {
	if names := [...]string{"auto", "one-shot", "two-shot-packets", "two-shot", "two-shot-lines", "pipelined", "pushed"}; a >= 0 && int(a) < len(names) {
		return names[a]
	}
	return fmt.Sprintf("algorithm %d", int(a))
}

// spans has, by the number of ranks, the maximum sizes for OneShot and for TwoShotPackets:
// they are the fastest algorithms up to there. The values are measured for 2 H200s, and
// otherwise estimated from a prototype. Fused norms must be smaller: see algorithmOf.
var spans = [maxRanks + 1][2]int{
	2: {1 << 20, 1 << 20},
	3: {128 << 10, 256 << 10}, 4: {128 << 10, 256 << 10},
	5: {32 << 10, 256 << 10}, 6: {32 << 10, 256 << 10}, 7: {32 << 10, 256 << 10}, 8: {32 << 10, 256 << 10},
}

// lineSpans has, by the number of ranks, the range of sizes for TwoShotLines, if it is
// supported: above the first size, up to the second one. The values are measured for 2
// H200s. The others are estimates from measurements of an earlier, longer kernel on 4.
var lineSpans = [maxRanks + 1][2]int{
	2: {384 << 10, 4 << 20}, 3: {128 << 10, 4 << 20}, 4: {128 << 10, 4 << 20},
	5: {128 << 10, 4 << 20}, 6: {128 << 10, 4 << 20}, 7: {128 << 10, 4 << 20}, 8: {128 << 10, 4 << 20},
}

// choose returns the algorithm for a size, which must not exceed the limit of TwoShot.
func (r *Rank) choose(bytes int) Algorithm {
	l, span, lines := r.Limits(), spans[r.ranks], lineSpans[r.ranks]
	switch {
	case bytes > lines[0] && bytes <= min(lines[1], l.TwoShotLines):
		return TwoShotLines
	case bytes <= min(span[0], l.OneShot):
		return OneShot
	case bytes <= min(span[1], l.TwoShotPackets):
		return TwoShotPackets
	}
	return TwoShot
}

// Limits are the maximum sizes of operations in bytes.
type Limits struct {
	// Of AllReduce, by algorithm; TwoShotLines is 0 if it is not supported.
	OneShot, TwoShotPackets, TwoShot, TwoShotLines int

	// Part is for one rank's part of the other collectives: the elements that a rank
	// contributes to AllGather, gets from ReduceScatter, or sends to one other rank.
	Part int
}

// AllReduce returns the maximum size of AllReduce with any algorithm.
func (l Limits) AllReduce() int { return l.TwoShot }

// Limits returns the maximum sizes of operations of r, the same on all ranks.
func (r *Rank) Limits() Limits {
	// A share, in packets or lines, must fit in a slot, and the shares of all ranks in a
	// whole.
	share := func(bytes int) int { return min(r.slot/bytes, r.whole/bytes/r.ranks) }
	l := Limits{OneShot: r.slot / 2, TwoShotPackets: share(packetBytes) * r.ranks * 8, TwoShot: r.whole, Part: r.slot / 2}
	if r.noLines == "" {
		l.TwoShotLines = share(lineBytes) * r.ranks * lineWords * 8
	}
	return l
}

func (l *Limits) of(a Algorithm) int {
	switch a {
	case OneShot:
		return l.OneShot
	case TwoShotPackets:
		return l.TwoShotPackets
	case TwoShotLines:
		return l.TwoShotLines
	}
	return l.TwoShot
}

// steps returns the number of threads that the algorithm can use: one for each word, cell or
// line lane.
func (a Algorithm) steps(bytes, ranks int) int {
	switch a {
	case TwoShotPackets:
		return over(over(bytes, 8), ranks)
	case TwoShot:
		return over(over(bytes, 16), ranks)
	case TwoShotLines:
		return over(over(bytes, lineWords*8), ranks) * lineLanes
	case Pipelined:
		return over(over(min(bytes, chunkBytes), cellBytes), ranks)
	}
	return over(bytes, 8)
}

// A grid is the number of blocks of a kernel, and of threads per block.
type grid struct{ blocks, threads uint32 }

// grid returns the grid for the given number of steps, the same on all ranks. Blocks are
// small, to use as many multiprocessors as possible, until each multiprocessor has one.
func (r *Rank) grid(steps int) grid {
	if r.forced.threads != 0 {
		return r.forced
	}
	threads := min(over(steps, warp)*warp, 4*warp)
	for threads < maxThreads && steps > threads*r.blocks {
		threads *= 2
	}
	return grid{uint32(min(over(steps, threads), r.blocks)), uint32(threads)}
}

// chunkThreads is the number of threads of many blocks of pipelined operations: with more, two H200s need up to 4 % more time.
const chunkThreads = 256

// chunkGrid returns the grid for a chunk of cells: all blocks, if each of their
// threads has a cell, except those of the first warp of each block, which moves
// none.
func (r *Rank) chunkGrid(cells int) grid {
	g := r.forced
	if g.threads == 0 {
		most := maxThreads
		if r.blocks > maxBlocks/2 {
			most = chunkThreads
		}
		threads := min(over(over(cells, r.blocks), warp)*warp, most-warp)
		g = grid{uint32(min(over(cells, threads), r.blocks)), uint32(threads)}
	}
	g.threads = min(g.threads+warp, maxThreads)
	return g
}

// over is n / by, rounded up.
func over(n, by int) int { return (n + by - 1) / by }
