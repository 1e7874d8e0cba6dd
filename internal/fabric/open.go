package fabric

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Config are the options of Open. They must be the same on all ranks.
type Config struct {
	// Bytes is the maximum size of AllReduce, rounded up to 64 KiB; 0 means 8 MiB. The
	// maximum of the other collectives, and of AllReduce by OneShot, is in Rank.Limits:
	// about that size divided by the number of ranks. A rank needs about eight times as
	// much scratch memory, with or without lines, and relatively more below 512 KiB.
	Bytes int
	// Blocks is the maximum number of thread blocks of a kernel; 0 means a block for each multiprocessor, at most 128.
	Blocks int
	// Slot is not 0 for a rank of experts: each rank sends it up to so many bytes, rounded up to 64 KiB. Such a rank has no
	// memory for anything but Dispatch and Combine.
	Slot int
	// Pushes is set for a rank with a Slot that executes all-reduces by Pushed instead: a share has up to so many bytes at a time.
	// Blocks does not count then.
	Pushes bool
}

const (
	defaultBytes = 8 << 20
	unitBytes    = 64 << 10 // slots and wholes are multiples of unitBytes
	mostBytes    = 1 << 30
)

// Open opens a rank of a group whose ranks are GPUs of one host, in any processes, at most
// 8. It is collective: the ranks find each other by exchange, and all ranks return the
// same outcome unless exchange fails on some ranks only. Open allocates the scratch memory,
// stream-ordered on s, a stream of the rank's device, and waits for s. If the driver permits
// TwoShotLines, the ranks test it, and do not use it if the test fails.
//
// If there are too many ranks, if they are on several hosts, if two use one GPU, or if
// their GPUs cannot access each other's memory, the error is a *device.UnsupportedError,
// which matches errors.ErrUnsupported.
//
// For tests, CHORUS_SHARE_GPUS=yes permits several ranks on one GPU. The kernels of these
// ranks have fewer blocks, so that all of them are resident at once. Ranks of one process
// must not do anything that waits for the whole GPU while their operations run: loading
// a kernel, freeing memory to the driver, or using the default stream.
func Open(ctx context.Context, s *stream.Stream, rank, ranks int, exchange collective.Exchange, cfg *Config) (*Rank, error) {
	const op = "fabric: open"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return nil, err
	}
	switch {
	case ranks < 1 || rank < 0 || rank >= ranks:
		return nil, fmt.Errorf("%s: rank %d of %d does not exist", op, rank, ranks)
	case exchange == nil && ranks > 1:
		return nil, fmt.Errorf("%s: no exchange given", op)
	case cfg != nil && (cfg.Bytes < 0 || cfg.Bytes > mostBytes || cfg.Blocks < 0 || cfg.Slot < 0):
		return nil, fmt.Errorf("%s: Bytes is %d, Blocks %d and Slot %d: want 0 to %d, and 0 or more", op, cfg.Bytes, cfg.Blocks, cfg.Slot, mostBytes)
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "open the rank before the capture"); err != nil {
		return nil, err
	}
	r := &Rank{dev: s.Device(), rank: rank, ranks: ranks, whole: defaultBytes}
	if cfg != nil && cfg.Bytes > 0 {
		r.whole = over(cfg.Bytes, unitBytes) * unitBytes
	}
	r.blocks = maxBlocks
	if cfg != nil && cfg.Blocks > 0 {
		r.blocks = min(r.blocks, cfg.Blocks)
	}
	r.slot = over(r.whole/ranks, unitBytes) * unitBytes
	if cfg != nil && cfg.Slot > 0 {
		r.slot, r.whole = over(cfg.Slot, unitBytes)*unitBytes, 0
	}
	if cfg != nil && cfg.Pushes && ranks > 1 {
		r.pusher = &pusher{stop: make(chan struct{})}
	}
	if err := r.join(ctx, s, exchange); err != nil {
		return nil, errors.Join(r.errorf("open", "%w", err), r.free())
	}
	r.arm()
	handle.Init(r, &r.owner, handle.About{Kind: "rank of a fabric", On: r.dev})
	if err := r.tryLines(ctx, s, exchange); err != nil {
		return nil, errors.Join(r.errorf("open", "%w", err), r.Close())
	}
	return r, nil
}

// join allocates the rank's resources and finds the other ranks. After the last exchange
// all ranks are ready to receive the data of the first operation.
func (r *Rank) join(ctx context.Context, s *stream.Stream, exchange collective.Exchange) error {
	if r.ranks == 1 {
		return r.allocate(ctx, s)
	}
	mine, failed := r.prepare(ctx, s)
	infos, err := collective.Agree(ctx, exchange, r.ranks, mine, failed)
	if err != nil {
		return err
	}
	err = compareRanks(infos)
	if err == nil && r.pusher != nil {
		err = compareQueues(infos)
	}
	if err != nil {
		return err
	}
	r.blocks = blocksOf(infos)
	handles, err := r.share(ctx, exchange, infos)
	if err != nil {
		return err
	}
	if failed = r.link(s, infos, handles); failed == nil {
		failed = r.probe(ctx, s)
	}
	if failed == nil && r.pusher != nil {
		failed = r.pusher.open(ctx, r, s, infos)
	}
	if _, err = collective.Agree(ctx, exchange, r.ranks, true, failed); err != nil {
		return err
	}
	if failed = r.probed(ctx, s); failed == nil {
		failed = r.begin(ctx, s, infos[0].Epoch)
	}
	noLines := ""
	switch {
	case failed == nil && r.whole == 0:
		noLines = "a rank of experts or of copy engines"
	case failed == nil:
		noLines, failed = r.missesLines(infos)
	}
	said, err := collective.Agree(ctx, exchange, r.ranks, noLines, failed)
	if err == nil {
		r.noLines = firstOf(said)
	}
	return err
}

// prepare allocates the rank's resources, and makes its rankInfo.
func (r *Rank) prepare(ctx context.Context, s *stream.Stream) (c rankInfo, err error) {
	c = rankInfo{Rank: r.rank, Ranks: r.ranks, Bytes: max(r.whole, r.slot), Epoch: anyEpoch()}
	if r.ranks > maxRanks {
		return c, unsupported(fmt.Sprintf("at most %d ranks", maxRanks), fmt.Sprint(r.ranks))
	}
	c.Host, c.Process = here()
	if c.GPU, err = gpu.DeviceOf(r.dev).UUID(); err != nil {
		return c, err
	}
	p, err := r.dev.Properties()
	if err != nil {
		return c, err
	}
	c.Shares, c.Blocks = env.ShareGPUs.Value() == "yes", p.Multiprocessors
	c.Most = r.blocks
	r.clusters = p.Major >= 9
	if r.pusher != nil && r.rank == 0 {
		if r.pusher.flags, err = newFlagPage(r.dev); err != nil {
			return c, err
		}
		c.Flags = r.pusher.flags.name
	}
	if err := r.load(); err != nil {
		return c, err
	}
	if err := r.allocate(ctx, s); err != nil {
		return c, err
	}
	c.Scratch = r.peers[0].id
	return c, nil
}

// load loads some of the kernels; if these are unsupported, all others are too.
func (r *Rank) load() error {
	if r.pusher != nil {
		_, err := foldKernel(r.dev, memory.Float32, collective.Sum, WholeStage)
		return err
	}
	t := tools(r.dev, r.ranks)
	_, err := t.mover(r.dev, allGatherFn)
	if err == nil {
		_, err = t.reducer(r.dev, allReduceFn, formatOf[memory.Float32], collective.Sum)
	}
	if err != nil && errors.Is(err, errors.ErrUnsupported) {
		return unsupported("its kernels, or NVRTC to compile them", err.Error())
	}
	return err
}

// allocate allocates the rank's memory and zeroes it, because zero is not a
// valid epoch: anyEpoch is greater.
func (r *Rank) allocate(ctx context.Context, s *stream.Stream) (err error) {
	if r.host, err = memory.MakePinned[uint32](r.dev, 2); err != nil {
		return err
	}
	clear(r.host.Data())
	if r.ranks == 1 {
		return nil
	}
	if r.control, err = memory.Make[uint64](s, 2); err != nil {
		return err
	}
	words, err := memory.Make[uint64](s, (signalBytes+setsFor(r.whole)*(r.ranks*r.slot+r.whole))/8)
	if err != nil {
		return err
	}
	r.peers = append(r.peers, newScratch(words))
	if err := errors.Join(r.control.Zero(s), words.Zero(s)); err != nil {
		return err
	}
	return s.Sync(ctx)
}

// begin sets the epoch that precedes the first operation's epoch.
func (r *Rank) begin(ctx context.Context, s *stream.Stream, epoch uint64) error {
	if err := r.control.CopyFrom(s, []uint64{epoch * ticks, 0}); err != nil {
		return err
	}
	return s.Sync(ctx)
}

// share returns the handles of the scratch memory of each rank, for ranks of other
// processes. They are empty if all ranks are in this process.
func (r *Rank) share(ctx context.Context, exchange collective.Exchange, infos []rankInfo) ([]memory.IPCHandle, error) {
	if !slices.ContainsFunc(infos, func(c rankInfo) bool { return c.Process != infos[0].Process }) {
		return make([]memory.IPCHandle, r.ranks), nil
	}
	mine, failed := r.peers[0].words.IPCHandle()
	return collective.Agree(ctx, exchange, r.ranks, mine, failed)
}

// link maps the scratch memory of the other ranks, beginning with the rank after this
// one.
func (r *Rank) link(s *stream.Stream, infos []rankInfo, handles []memory.IPCHandle) error {
	for k := 1; k < r.ranks; k++ {
		peer := (r.rank + k) % r.ranks
		if err := r.reach(s, &infos[peer], handles[peer]); err != nil {
			return fmt.Errorf("the memory of rank %d: %w", peer, err)
		}
	}
	return nil
}

// reach appends the scratch memory of a rank to peers.
func (r *Rank) reach(s *stream.Stream, c *rankInfo, h memory.IPCHandle) error {
	if _, process := here(); c.Process != process {
		return r.reachFar(s, c, h)
	}
	x, err := findScratch(c.Scratch)
	if err != nil {
		return err
	}
	r.peers = append(r.peers, x)
	if err := x.words.RecordStream(s); err != nil { // probe copies there on s
		return err
	}
	if err := r.sameScratch(x.words); err != nil {
		return err
	}
	can, err := inside.Reach(r.dev, x.words.Device())
	if err == nil && !can {
		err = noAccess(r.dev, x.words.Device())
	}
	return err
}

// reachFar is reach for a rank of another process. If its GPU is not visible in this
// process, access cannot be queried: it is assumed if the driver maps the memory.
func (r *Rank) reachFar(s *stream.Stream, c *rankInfo, h memory.IPCHandle) error {
	peer := r.seen(c)
	if peer != nil && peer != r.dev {
		can, err := r.dev.CanAccessPeer(peer)
		if err != nil {
			return err
		}
		if works, tested := gpu.DeviceOf(r.dev).PeerTested(gpu.DeviceOf(peer)); !can || tested && !works {
			return noAccess(r.dev, peer)
		}
	}
	inside.OpenOnPeer(&h)
	words, err := memory.OpenIPC[uint64](s, h)
	switch {
	case err != nil && peer == nil && r.dev.Err() == nil:
		return unsupported("GPUs that this process sees, or whose memory it can map", err.Error())
	case err != nil:
		return err
	}
	r.peers = append(r.peers, &scratch{words: words})
	return r.sameScratch(words)
}

// sameScratch returns an error unless the memory is as long as this rank's: the kernels
// write to all parts.
func (r *Rank) sameScratch(words memory.Slice[uint64]) error {
	if mine := r.peers[0].words.Len(); words.Len() != mine {
		return fmt.Errorf("it has %d words: want %d", words.Len(), mine)
	}
	return nil
}

// seen returns the GPU of a rank if it is visible in this process, or nil.
func (r *Rank) seen(c *rankInfo) *device.Device {
	for _, peer := range r.dev.System().Devices() {
		if uuid, err := gpu.DeviceOf(peer).UUID(); err == nil && uuid == c.GPU {
			return peer
		}
	}
	return nil
}

func noAccess(a, b *device.Device) error {
	return unsupported("peer access between all GPUs", fmt.Sprintf("none between %s and %s", a, b))
}

// arm sets the arguments that are common to all operations.
func (r *Rank) arm() {
	r.stop.Store(&r.host.Data()[0])
	if r.ranks == 1 {
		return
	}
	for k := range r.args[:maxRanks] {
		if r.args[k] = kernel.Address(0); k < r.ranks {
			r.args[k] = kernel.Ptr(r.peers[k].words)
			inside.AllowPeers(&r.args[k])
		}
	}
	copy(r.args[rankParam:], []kernel.Arg{kernel.Scalar(uint32(r.rank)), kernel.Scalar(uint32(r.ranks)),
		kernel.Scalar(uint64(r.slot)), kernel.Scalar(uint64(r.whole)), kernel.Ptr(r.control), kernel.PinnedPtr(r.host)})
}

// free releases the rank's resources, which nothing uses any more.
func (r *Rank) free() error {
	errs := []error{r.pusher.close(r)}
	for _, p := range r.peers {
		errs = append(errs, p.close())
	}
	r.peers = nil
	return errors.Join(append(errs, r.control.Close(), r.host.Close())...)
}

// A rankInfo describes a rank to the other ranks.
type rankInfo struct {
	Rank, Ranks, Bytes int
	Host, Process      string // of the rank
	GPU                string // its UUID
	Shares             bool   // whether it may share its GPU with other ranks
	Blocks             int    // number of blocks that its multiprocessors can run at once
	Most               int    // number of blocks that its kernels may have
	Scratch            uint64 // id of its scratch memory in its process
	Epoch              uint64 // the initial epoch; all ranks use rank 0's
	Flags              string // of rank 0, if the ranks push
}

// anyEpoch returns a random initial epoch, so that data is unlikely to contain it: TwoShot
// leaves data where later operations look for packets of their epoch. Kernels store it
// multiplied by ticks.
func anyEpoch() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails
	return binary.LittleEndian.Uint64(b[:])/(2*ticks) | 1<<32
}

// compareRanks returns the reason why the ranks cannot form a group, the same on all ranks.
func compareRanks(infos []rankInfo) error {
	gpus := map[string]int{} // the first rank on each GPU
	for i := range infos {
		c := &infos[i]
		other, twice := gpus[c.GPU]
		switch first := &infos[0]; {
		case c.Rank != i:
			return fmt.Errorf("the exchange has rank %d in the place of rank %d", c.Rank, i)
		case c.Ranks != first.Ranks || c.Bytes != first.Bytes:
			return fmt.Errorf("rank %d wants %d ranks and %d bytes, rank 0 wants %d and %d: want the same on all",
				i, c.Ranks, c.Bytes, first.Ranks, first.Bytes)
		case c.Host != first.Host:
			return unsupported("all ranks on one host", fmt.Sprintf("rank %d on another than rank 0", i))
		case c.Shares != first.Shares:
			return fmt.Errorf("ranks 0 and %d differ in %s: set it alike for all", i, env.ShareGPUs.Name)
		case twice && !c.Shares:
			return unsupported("a GPU for each rank, or "+env.ShareGPUs.Name+"=yes for tests", fmt.Sprintf("one for ranks %d and %d", other, i))
		case !twice:
			gpus[c.GPU] = i
		}
	}
	return nil
}

// blocksOf returns the maximum number of blocks of a kernel, the same on all ranks. A kernel
// waits for the kernels of the other ranks, so the kernels of all ranks on one GPU must be
// resident at once. They leave some multiprocessors to copies and other kernels.
func blocksOf(infos []rankInfo) int {
	ranks := map[string]int{}
	for i := range infos {
		ranks[infos[i].GPU]++
	}
	blocks := maxBlocks
	for i := range infos {
		blocks = min(blocks, max(infos[i].Most, 1))
		parts := 1
		if n := ranks[infos[i].GPU]; n > 1 {
			parts = n + 1
		}
		blocks = min(blocks, max(infos[i].Blocks/parts, 1))
	}
	return blocks
}

// here returns identifiers of the host and the process.
var here = sync.OnceValues(func() (host, process string) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		id = nil
	}
	name, _ := os.Hostname() // without the name, the other identifiers are sufficient
	return strings.TrimSpace(string(id)) + "/" + name, fmt.Sprintf("%d/%s", os.Getpid(), rand.Text())
})

// Host returns an identifier of this host: the same in all its processes, and different on
// other hosts.
func Host() string {
	host, _ := here()
	return host
}

// A scratch is the scratch memory of a rank. Other ranks write to it, so it is freed only when each rank that has mapped it has
// ended its use, and behind everything that these ranks have enqueued for it. A rank ends its uses in free, after which it enqueues
// nothing. Two kinds of work may still be pending on the device then:
//
//   - Kernels and copies of operations: Close waits for their streams before free.
//   - Copies of probe, on the stream of Open. Open does not wait for them when its context ends. That stream is a recorded user
//     of the memory of a rank of this process, which is therefore reused only once the pending work of that stream has finished.
//     Memory of another process belongs to the stream of Open here: its Close waits for the stream before that process may free
//     the memory.
//
// So no rank waits for another one, and an end of the context, a failure or a lost rank may come at any time.
type scratch struct {
	id    uint64 // 0 for memory of another process
	words memory.Slice[uint64]
	uses  int // guarded by scratches.mu

	unaccount func() // ends the account of the memory
}

var scratches struct {
	mu   sync.Mutex
	last uint64
	open map[uint64]*scratch
}

// newScratch registers memory, with one use.
func newScratch(words memory.Slice[uint64]) *scratch {
	t := &scratches
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	x := &scratch{id: t.last, words: words, uses: 1}
	if t.open == nil {
		t.open = map[uint64]*scratch{}
	}
	t.open[x.id] = x
	use := inside.Use{Owner: "memory of Chorus kernels for collectives", Bytes: uint64(words.Bytes()), Inside: true}
	x.unaccount = inside.Account(words.Device(), func() (inside.Use, bool) { return use, true })
	return x
}

// findScratch returns scratch memory that another rank of this process has registered, and
// adds a use.
func findScratch(id uint64) (*scratch, error) {
	t := &scratches
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.open[id]
	if x == nil {
		return nil, errors.New("its scratch memory is gone")
	}
	x.uses++
	return x, nil
}

// close ends one use.
func (x *scratch) close() error {
	if x == nil {
		return nil
	}
	if x.id == 0 {
		return x.words.Close()
	}
	t := &scratches
	t.mu.Lock()
	x.uses--
	last := x.uses == 0
	if last {
		delete(t.open, x.id)
	}
	t.mu.Unlock()
	if !last {
		return nil
	}
	x.unaccount()
	return x.words.Close()
}

// ErrAborted is the error of operations of a rank after Abort, and of its Err. The
// destinations of aborted operations are undefined.
var ErrAborted = errors.New("the rank was aborted")

// errorf is fmt.Errorf with the package and the rank as prefix.
func (r *Rank) errorf(op, format string, args ...any) error {
	return fmt.Errorf("fabric: %s on rank %d of %d (%s): %w", op, r.rank, r.ranks, r.dev, fmt.Errorf(format, args...))
}

func unsupported(need, have string) error {
	return &device.UnsupportedError{Feature: "a fabric", Need: need, Have: have}
}
