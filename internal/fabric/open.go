package fabric

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Config are the options of Open. All ranks have the same.
type Config struct {
	// Bytes is how much AllReduce can take, rounded up to 64 KiB; 0 means 8 MiB. The
	// other collectives take, and AllReduce by OneShot, what Rank.Limits says: about a
	// part of that for each rank. A rank has about eight times as
	// much scratch memory, whether or not it has lines, and more of less than 512 KiB.
	Bytes int
}

const (
	defaultBytes = 8 << 20
	unitBytes    = 64 << 10 // of which slots and wholes are multiples
	mostBytes    = 1 << 30
)

// Open makes this rank of a group whose ranks are GPUs of one host, in any processes,
// at most 8. It is collective: exchange lets the ranks find each other, and on all of
// them the outcome is the same unless exchange fails on some only. Open allocates the
// scratch memory in the order of s, whose device is the rank's, and waits for s. Where
// TwoShotLines may be had the ranks try it, and go without if what comes is wrong.
//
// Where the ranks are too many, on several hosts, two on one GPU, or their GPUs do not
// reach each other's memory, the error matches errors.ErrUnsupported: it has a
// *device.UnsupportedError.
func Open(ctx context.Context, s *stream.Stream, rank, ranks int, exchange Exchange, cfg *Config) (*Rank, error) {
	const op = "fabric: open"
	if err := s.Check(op, nil); err != nil {
		return nil, err
	}
	switch {
	case ranks < 1 || rank < 0 || rank >= ranks:
		return nil, fmt.Errorf("%s: rank %d of %d does not exist", op, rank, ranks)
	case exchange == nil && ranks > 1:
		return nil, fmt.Errorf("%s: no exchange given", op)
	case cfg != nil && (cfg.Bytes < 0 || cfg.Bytes > mostBytes):
		return nil, fmt.Errorf("%s: Bytes is %d: want 0 to %d", op, cfg.Bytes, mostBytes)
	}
	if err := s.RefuseCapture(op, "open the rank before the capture"); err != nil {
		return nil, err
	}
	r := &Rank{dev: s.Device(), rank: rank, ranks: ranks, whole: defaultBytes}
	if cfg != nil && cfg.Bytes > 0 {
		r.whole = over(cfg.Bytes, unitBytes) * unitBytes
	}
	r.blocks = maxBlocks
	r.slot = over(r.whole/ranks, unitBytes) * unitBytes
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

// join allocates what the rank needs and finds the others. When the last exchange is
// over all of them are ready for what the first operation sends.
func (r *Rank) join(ctx context.Context, s *stream.Stream, exchange Exchange) error {
	if r.ranks == 1 {
		return r.allocate(ctx, s)
	}
	mine, failed := r.prepare(ctx, s)
	cards, err := confer(ctx, exchange, r.ranks, mine, failed)
	if err != nil {
		return err
	}
	if err := agree(cards); err != nil {
		return err
	}
	for i := range cards {
		r.blocks = min(r.blocks, max(cards[i].Blocks, 1))
	}
	handles, err := r.share(ctx, exchange, cards)
	if err != nil {
		return err
	}
	if failed = r.link(s, cards, handles); failed == nil {
		failed = r.probe(ctx, s)
	}
	if _, err = confer(ctx, exchange, r.ranks, true, failed); err != nil {
		return err
	}
	if failed = r.probed(ctx, s); failed == nil {
		failed = r.begin(ctx, s, cards[0].Epoch)
	}
	noLines := ""
	if failed == nil {
		noLines, failed = r.missesLines(cards)
	}
	said, err := confer(ctx, exchange, r.ranks, noLines, failed)
	if err == nil {
		r.noLines = firstOf(said)
	}
	return err
}

// prepare allocates what is the rank's own, and makes its card.
func (r *Rank) prepare(ctx context.Context, s *stream.Stream) (c card, err error) {
	c = card{Rank: r.rank, Ranks: r.ranks, Bytes: r.whole, Epoch: anyEpoch()}
	if r.ranks > maxRanks {
		return c, unsupported(fmt.Sprintf("at most %d ranks", maxRanks), fmt.Sprint(r.ranks))
	}
	c.Host, c.Process = here()
	if c.GPU, err = r.dev.UUID(); err != nil {
		return c, err
	}
	p, err := r.dev.Properties()
	if err != nil {
		return c, err
	}
	c.Blocks = max(p.Multiprocessors, 1)
	if err := r.load(); err != nil {
		return c, err
	}
	if err := r.allocate(ctx, s); err != nil {
		return c, err
	}
	c.Scratch = r.peers[0].id
	return c, nil
}

// load loads some kernels: where they cannot be had, no other can.
func (r *Rank) load() error {
	t := tools(r.dev, r.ranks)
	_, err := t.mover(r.dev, allGatherFn)
	if err == nil {
		_, err = t.reducer(r.dev, allReduceFn, formatOf[memory.Float32], Sum)
	}
	if err != nil && errors.Is(err, errors.ErrUnsupported) {
		return unsupported("its kernels, or NVRTC to compile them", err.Error())
	}
	return err
}

// allocate makes the rank's own memory, all zero: of no epoch, since anyEpoch is more.
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
	words, err := memory.Make[uint64](s, (signalBytes+sets*(r.ranks*r.slot+r.whole))/8)
	if err != nil {
		return err
	}
	r.peers = append(r.peers, newScratch(words))
	if err := errors.Join(r.control.Zero(s), words.Zero(s)); err != nil {
		return err
	}
	return s.Sync(ctx)
}

// begin sets the epoch before that of the first operation.
func (r *Rank) begin(ctx context.Context, s *stream.Stream, epoch uint64) error {
	if err := r.control.CopyFrom(s, []uint64{epoch * ticks, 0}); err != nil {
		return err
	}
	return s.Sync(ctx)
}

// share returns by what ranks of other processes open the scratch memory of each rank:
// nothing where all are of this one.
func (r *Rank) share(ctx context.Context, exchange Exchange, cards []card) ([]memory.IPCHandle, error) {
	if !slices.ContainsFunc(cards, func(c card) bool { return c.Process != cards[0].Process }) {
		return make([]memory.IPCHandle, r.ranks), nil
	}
	mine, failed := r.peers[0].words.IPCHandle()
	return confer(ctx, exchange, r.ranks, mine, failed)
}

// link maps the scratch memory of the others, in the order of the ranks after this one.
func (r *Rank) link(s *stream.Stream, cards []card, handles []memory.IPCHandle) error {
	for k := 1; k < r.ranks; k++ {
		peer := (r.rank + k) % r.ranks
		if err := r.reach(s, &cards[peer], handles[peer]); err != nil {
			return fmt.Errorf("the memory of rank %d: %w", peer, err)
		}
	}
	return nil
}

// reach adds the scratch memory of a rank to peers.
func (r *Rank) reach(s *stream.Stream, c *card, h memory.IPCHandle) error {
	if _, process := here(); c.Process != process {
		return r.reachFar(s, c, h)
	}
	x, err := findScratch(c.Scratch)
	if err != nil {
		return err
	}
	r.peers = append(r.peers, x)
	if err := r.sameScratch(x.words); err != nil {
		return err
	}
	can, err := memory.Reach(r.dev, x.words.Device())
	if err == nil && !can {
		err = noAccess(r.dev, x.words.Device())
	}
	return err
}

// reachFar is reach for a rank of another process. A GPU that this process does not see
// cannot be asked for: it reaches that one's memory if the driver maps it.
func (r *Rank) reachFar(s *stream.Stream, c *card, h memory.IPCHandle) error {
	peer := r.seen(c)
	if peer != nil {
		can, err := r.dev.CanAccessPeer(peer)
		if err != nil {
			return err
		}
		if works, tested := r.dev.PeerTested(peer); !can || tested && !works {
			return noAccess(r.dev, peer)
		}
	}
	words, err := memory.OpenPeerIPC[uint64](s, h)
	switch {
	case err != nil && peer == nil && r.dev.Err() == nil:
		return unsupported("GPUs that this process sees, or whose memory it can map", err.Error())
	case err != nil:
		return err
	}
	r.peers = append(r.peers, &scratch{words: words})
	return r.sameScratch(words)
}

// sameScratch returns an error unless the memory is as long as this rank's own: the kernels
// write all of it.
func (r *Rank) sameScratch(words memory.Slice[uint64]) error {
	if mine := r.peers[0].words.Len(); words.Len() != mine {
		return fmt.Errorf("it has %d words: want %d", words.Len(), mine)
	}
	return nil
}

// seen returns the GPU of a rank as this process has it, or nil.
func (r *Rank) seen(c *card) *device.Device {
	for _, peer := range r.dev.System().Devices() {
		if uuid, err := peer.UUID(); err == nil && uuid == c.GPU {
			return peer
		}
	}
	return nil
}

func noAccess(a, b *device.Device) error {
	return unsupported("peer access between all GPUs", fmt.Sprintf("none between %s and %s", a, b))
}

// arm makes the arguments that all operations have.
func (r *Rank) arm() {
	r.stop.Store(&r.host.Data()[0])
	if r.ranks == 1 {
		return
	}
	for k := range r.args[:maxRanks] {
		if r.args[k] = kernel.Null(); k < r.ranks {
			r.args[k] = kernel.PeerPtr(r.peers[k].words)
		}
	}
	copy(r.args[rankParam:], []kernel.Arg{kernel.Uint32(uint32(r.rank)), kernel.Uint32(uint32(r.ranks)),
		kernel.Uint64(uint64(r.slot)), kernel.Uint64(uint64(r.whole)), kernel.Ptr(r.control), kernel.PinnedPtr(r.host)})
}

// free gives up what the rank has. Nothing uses it.
func (r *Rank) free() error {
	var errs []error
	for _, p := range r.peers {
		errs = append(errs, p.close())
	}
	r.peers = nil
	return errors.Join(append(errs, r.control.Close(), r.host.Close())...)
}
