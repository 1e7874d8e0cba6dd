package fabric_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var (
	lineOps  = flag.Int("lines", 4000, "how many operations TestLines has on GPUs")
	lineSeed = flag.Uint64("linesseed", 0, "the seed of TestLines; 0 is a random one")
)

// Lines of many operations, each of other random bytes, are whole: of lengths around
// whole lines and of a few bytes, by other grids, in place or not, aligned or not, behind
// operations by other ways, beside copies between the same GPUs.
func TestLines(t *testing.T) {
	each(t, []int{2, 3}, func(t *testing.T, devs []*device.Device) {
		seed, batches := *lineSeed, testgpu.Rounds(testhost.Rounds(4, 8), 24)
		if seed == 0 {
			seed = rand.Uint64()
		}
		t.Log("seed ", seed)
		if devs[0].System().Backend() == "cuda" {
			batches = max(*lineOps/batchOps, 1)
		}
		group := open(t, devs, &fabric.Config{Bytes: 1 << 20})
		require.NoError(t, group[0].Supports(fabric.TwoShotLines))
		defer traffic(t, devs)()
		rng := rand.New(rand.NewPCG(seed, 0))
		for range batches {
			b := newBatch(rng, len(devs), group[0].Limits().TwoShotLines)
			atOnce(group, func(_ int, m member) {
				m.SetGrid(b.blocks, b.threads)
				if err := b.run(m); err != nil {
					t.Error(err)
				}
			})
			if t.Failed() {
				break
			}
		}
	})
}

// traffic copies from each device to the next until stop is called.
func traffic(t *testing.T, devs []*device.Device) (stop func()) {
	const n = 1 << 20
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i, dev := range devs {
		next := devs[(i+1)%len(devs)]
		s, far := newStream(t, dev), newStream(t, next)
		from, to := makeOf[byte](t, s, n), makeOf[byte](t, far, n)
		require.NoError(t, errors.Join(s.Sync(ctx), far.Sync(ctx)))
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := errors.Join(memory.Copy(s, to, from), s.Sync(context.WithoutCancel(ctx))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

const batchOps = 20

// A batch is operations that no rank waits between.
type batch struct {
	blocks, threads int
	ranks           int
	seed            [32]byte
	ops             []lineOp
	bytes           int // of the buffers
}

// A lineOp is one of them.
type lineOp struct {
	dst, src, n int // in bytes, as there is one to an element
	op          collective.Reduction
	way         fabric.Algorithm
}

func newBatch(rng *rand.Rand, ranks, limit int) *batch {
	b := &batch{ranks: ranks}
	binary.LittleEndian.PutUint64(b.seed[:], rng.Uint64())
	if rng.IntN(2) == 0 {
		b.blocks, b.threads = 1+rng.IntN(8), 32*(1+rng.IntN(8))
	}
	for range batchOps {
		op := lineOp{n: lineLength(rng, ranks, limit), op: collective.Sum, way: fabric.TwoShotLines}
		if rng.IntN(2) == 0 {
			op.op = collective.Min
		}
		if rng.IntN(3) == 0 {
			op.way = []fabric.Algorithm{fabric.OneShot, fabric.TwoShotPackets, fabric.TwoShot}[rng.IntN(3)]
			op.n = min(op.n, 4<<10)
		}
		op.src = b.bytes + rng.IntN(24)
		op.dst = op.src
		b.bytes = op.src + op.n
		if rng.IntN(2) == 0 {
			op.dst = (b.bytes+7)/8*8 + rng.IntN(2)*rng.IntN(8)
			b.bytes = op.dst + op.n
		}
		b.bytes = (b.bytes + 1 + 7) / 8 * 8 // at least one byte that nobody writes
		b.ops = append(b.ops, op)
	}
	return b
}

// lineLength draws a number of bytes: a few, or some about whole lines of all ranks, the
// fewer the likelier.
func lineLength(rng *rand.Rand, ranks, limit int) int {
	if rng.IntN(3) == 0 {
		return 1 + rng.IntN(1<<rng.IntN(8))
	}
	n := 120 * ranks * (1 + rng.IntN(1<<rng.IntN(6)))
	switch rng.IntN(40) {
	case 0:
		return limit - rng.IntN(200)
	case 1:
		n += 120 * rng.IntN(ranks)
	}
	return n + rng.IntN(17) - 8
}

// source is what a rank has before: random bytes.
func (b *batch) source(rank int) []byte {
	seed := b.seed
	seed[31] = byte(rank + 1)
	x := make([]byte, b.bytes)
	_, _ = rand.NewChaCha8(seed).Read(x) // it does not fail
	return x
}

// want is what a rank has after.
func (b *batch) want(rank int) []byte {
	all := make([][]byte, b.ranks)
	for r := range all {
		all[r] = b.source(r)
	}
	out := bytes.Clone(all[rank])
	for _, op := range b.ops {
		for i := range op.n {
			result := all[0][op.src+i]
			for _, x := range all[1:] {
				if op.op == collective.Sum {
					result += x[op.src+i]
				} else {
					result = min(result, x[op.src+i])
				}
			}
			out[op.dst+i] = result
		}
	}
	return out
}

func (b *batch) run(m member) (err error) {
	x, err := memory.Make[byte](m.s, b.bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	if err := x.CopyFrom(m.s, b.source(m.Rank.Rank())); err != nil {
		return err
	}
	for _, op := range b.ops {
		dst, src := x.Slice(op.dst, op.dst+op.n), x.Slice(op.src, op.src+op.n)
		if err := fabric.AllReduce(m.Rank, m.s, dst, src, op.op, &fabric.AllReduceConfig{Algorithm: op.way}); err != nil {
			return err
		}
	}
	got, want := make([]byte, b.bytes), b.want(m.Rank.Rank())
	if err := x.CopyTo(m.s, got); err != nil {
		return err
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("rank %d: %s: %d blocks of %d threads: %+v", m.Rank.Rank(), b.at(i, got, want), b.blocks, b.threads, b.ops)
		}
	}
	return nil
}

// at says what is wrong at a byte, by the operation that it is the result of.
func (b *batch) at(i int, got, want []byte) string {
	for k, op := range b.ops {
		if i >= op.dst && i < op.dst+op.n {
			to := min(i+32, op.dst+op.n)
			return fmt.Sprintf("operation %d, %d bytes by %s: from byte %d on %v, want %v", k, op.n, op.way, i-op.dst, got[i:to], want[i:to])
		}
	}
	return fmt.Sprintf("byte %d, which is of no operation, is %d, want %d", i, got[i], want[i])
}

// Where the link between two GPUs is no NVLink nobody goes by lines, alike on all ranks:
// who asks for them is told why, and Auto has what is the fastest without.
func TestLinesNeedNVLink(t *testing.T) {
	for _, pair := range [][2]int{{0, 1}, {2, 0}, {1, 2}} {
		group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, VirtualPCIe: [][2]int{pair}}), nil)
		noLines(t, group, fmt.Sprintf("two-shot-lines needs GPUs that NVLink joins, which keeps lines of 128 bytes whole; "+
			"this machine has another link between ranks %d and %d", min(pair[0], pair[1]), max(pair[0], pair[1])))
	}
}

// Nobody goes by lines where a rank cannot ask for the link to another one's GPU: here that
// of rank 1 is one that only rank 0 does not see.
func TestLinesNeedGPUsThatAreSeen(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	group, errs := openMisled(t, devs, `"GPU":"[^"]*"`, `"GPU":"another"`)
	require.NoError(t, errors.Join(errs...))
	defer closeAll(t, group)
	noLines(t, group, "two-shot-lines needs GPUs that NVLink joins, which keeps lines of 128 bytes whole; this machine has "+
		"a link between ranks 0 and 1 that the driver does not tell of, since the process of rank 0 does not see the other GPU")
}

// openMisled opens a group of two ranks, in which rank 0 first reads something else than rank 1 has said.
func openMisled(t *testing.T, devs []*device.Device, old, new string) ([]member, []error) {
	return openBy(t, testgpu.Context(t), devs, func(i int, _ *stream.Stream, say collective.Exchange) (collective.Exchange, *fabric.Config) {
		turn := 0
		return func(ctx context.Context, mine []byte) ([][]byte, error) {
			said, err := say(ctx, mine)
			if turn++; i == 0 && turn == 1 && err == nil {
				said = [][]byte{said[0], regexp.MustCompile(old).ReplaceAll(said[1], []byte(new))}
			}
			return said, err
		}, nil
	})
}

// Only GPUs that NCCL sends lines between do so here.
func TestLinesNeedCapability(t *testing.T) {
	for capability, want := range map[[2]int]bool{{6, 0}: false, {7, 0}: true, {7, 5}: false, {8, 0}: true, {8, 6}: false, {8, 9}: false, {9, 0}: true, {10, 0}: true, {10, 3}: true, {12, 0}: true} {
		require.Equal(t, want, fabric.KeepsLines(capability[0], capability[1]), "%v", capability)
	}
}

// noLines checks that a group does without lines, and why.
func noLines(t *testing.T, group []member, why string) {
	t.Helper()
	require.Zero(t, group[0].Limits().TwoShotLines)
	for _, m := range group {
		require.EqualError(t, m.Supports(fabric.TwoShotLines), why)
		require.NoError(t, m.Supports(fabric.TwoShot))
		require.Equal(t, group[0].Limits(), m.Limits())
		for bytes := 1; bytes <= m.Limits().AllReduce(); bytes *= 2 {
			require.NotEqual(t, fabric.TwoShotLines, m.Choose(bytes))
		}
		x := makeOf[float32](t, m.s, 8)
		require.ErrorContains(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.TwoShotLines}), "there is no kernel for that")
		o := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Float32, Reduction: collective.Sum, N: 8}}}
		require.False(t, m.Takes(&o, fabric.TwoShotLines))
		require.True(t, m.Takes(&o, fabric.Auto))
	}
	k := floats(func(x float32) float32 { return x })
	carryOut(t, group, k, call{name: "all-reduce", n: 300_000})
}

// Where lines come torn on one rank when the group is opened, none goes by them.
func TestTornLines(t *testing.T) {
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		restore, err := fabric.SpoilLines(devs[1], len(devs))
		require.NoError(t, err)
		defer restore()
		group := open(t, devs, nil)
		require.ErrorContains(t, group[0].Supports(fabric.TwoShotLines), "on rank ")
		noLines(t, group, group[0].Supports(fabric.TwoShotLines).Error())
	})
}

// Who waits for the lines of a rank that does not come, when the group is opened, ends
// with the context.
func TestLinesOfNobody(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx, cancel := context.WithCancelCause(testgpu.Context(t))
	defer cancel(nil)
	late := errors.New("too late")
	var streams [2]*stream.Stream
	leave := func() error {
		for {
			if done, err := streams[0].Query(); !done || err != nil {
				cancel(late)
				return errors.Join(err, late)
			}
		}
	}
	_, errs := openBy(t, ctx, devs, func(i int, s *stream.Stream, say collective.Exchange) (collective.Exchange, *fabric.Config) {
		streams[i] = s
		turn := 0
		return func(ctx context.Context, mine []byte) ([][]byte, error) {
			said, err := say(ctx, mine)
			if turn++; i == 1 && turn == 4 { // behind it comes the trial
				return nil, leave()
			}
			return said, err
		}, nil
	})
	require.ErrorIs(t, errs[0], late)
	require.ErrorIs(t, errs[1], late)
	require.Zero(t, fabric.Scratches())
}

// Auto takes the fastest way of those that there are, and each length has one.
func TestChoose(t *testing.T) {
	for _, n := range []int{2, 3, 8} {
		group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), nil)
		l, last, turns := group[0].Limits(), fabric.Auto, []fabric.Algorithm{}
		for bytes := 8; bytes <= l.AllReduce(); bytes += 8 << 10 {
			a := group[0].Choose(bytes)
			require.LessOrEqual(t, bytes, limitOf(group[0], a))
			if a != last {
				turns = append(turns, a)
			}
			last = a
		}
		want := []fabric.Algorithm{fabric.OneShot, fabric.TwoShotPackets, fabric.TwoShotLines, fabric.TwoShot}
		if n < 5 { // one-shot goes as far as packets
			want = []fabric.Algorithm{fabric.OneShot, fabric.TwoShotLines, fabric.TwoShot}
		}
		require.Equal(t, want, turns, "%d ranks", n)
	}
	drawn := testgpu.Sample(t, 3)
	for _, n := range []int{2, 3, 4, 5, 6, 7, 8} {
		if !drawn() {
			continue
		}
		first := map[int]int{2: 384 << 10, 3: 128 << 10, 4: 128 << 10, 5: 128 << 10, 6: 128 << 10, 7: 128 << 10, 8: 128 << 10}[n]
		r := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), nil)[0]
		require.NotEqual(t, fabric.TwoShotLines, r.Choose(first), "%d ranks", n)
		require.Equal(t, fabric.TwoShotLines, r.Choose(first+1), "%d ranks", n)
		require.Equal(t, fabric.TwoShotLines, r.Choose(4<<20), "%d ranks", n)
		require.Equal(t, fabric.TwoShot, r.Choose(4<<20+1), "%d ranks", n)
	}
}
