package fabric

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// SetEpoch moves the next operation of r to the epoch after the given one. r is
// idle.
func (r *Rank) SetEpoch(s *stream.Stream, epoch uint64) error {
	return r.control.CopyFrom(s, []uint64{epoch * ticks, 0})
}

// SetGrid sets the grid of all operations of r from now on, except norms, to so many blocks
// of so many threads, or restores the default if both are 0. All ranks do the same.
func (r *Rank) SetGrid(blocks, threads int) { r.forced = grid{uint32(blocks), uint32(threads)} }

// Grid returns the blocks and threads that so many steps get.
func (r *Rank) Grid(steps int) (blocks, threads int) {
	g := r.grid(steps)
	return int(g.blocks), int(g.threads)
}

// SetClusters lets kernels of r use clusters of thread blocks, or not.
func (r *Rank) SetClusters(on bool) { r.clusters = on }

// NormGrid returns the blocks of a team, and the grid, for x.
func (r *Rank) NormGrid(x *Norm) (team, blocks, threads int) {
	team = r.teamOf(x)
	g := x.grid(team, r.blocks)
	return team, int(g.Blocks[0]), int(g.Threads[0])
}

// Steps is for how many words, cells or lanes of lines the algorithm needs a thread.
func (a Algorithm) Steps(bytes, ranks int) int { return a.steps(bytes, ranks) }

// Algorithms has those that can be asked for.
var Algorithms = []Algorithm{OneShot, TwoShotPackets, TwoShot, TwoShotLines, Pipelined}

// Choose returns what Auto is for so many bytes.
func (r *Rank) Choose(bytes int) Algorithm { return r.choose(bytes) }

// HaveLines lets r reduce by lines whatever its links are. All ranks do the same.
func (r *Rank) HaveLines() { r.noLines = "" }

// KeepsLines reports whether GPUs of a compute capability may go by lines.
func KeepsLines(major, minor int) bool { return keepsLines(major, minor) }

// SpoilLines replaces the sum of floats by lines by their maximum on a device, for so many ranks,
// until restore is called.
func SpoilLines(dev *device.Device, ranks int) (restore func(), err error) {
	t := tools(dev, ranks)
	at := &t.reduce[formatOf[memory.Float32]][collective.Sum]
	lines := allReduceFn + function(TwoShotLines) - 1
	greatest, err := t.reducer(dev, lines, formatOf[memory.Float32], collective.Max)
	if err == nil {
		_, err = t.reducer(dev, lines, formatOf[memory.Float32], collective.Sum)
	}
	if err != nil {
		return nil, err
	}
	right := at.Load()
	wrong := slices.Clone(*right)
	wrong[lines] = greatest
	at.Store(&wrong)
	return func() { at.Store(right) }, nil
}

// ExpertsVariant replaces the kernels of experts on a device by those of a source in which new stands for old, until restore is called.
func ExpertsVariant(dev *device.Device, x *ExpertLayer, old, new string) (restore func(), err error) {
	if strings.Count(expertsSource, old) != 1 {
		return nil, fmt.Errorf("%q is not once in the source", old)
	}
	if err := LoadExperts(dev, x); err != nil {
		return nil, err
	}
	t := tools(dev, x.Ranks)
	at := &t.experts[normFormatOf(x.DType).index]
	ks, err := x.compileExperts(dev, t, strings.Replace(expertsSource, old, new, 1))
	if err != nil {
		return nil, err
	}
	right := at.Load()
	at.Store(&ks)
	return func() { at.Store(right) }, nil
}

// Scratches returns how many ranks of the process have scratch memory.
func Scratches() int {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	return len(scratches.open)
}

// Blocks returns the number of blocks of the largest kernel of r.
func (r *Rank) Blocks() int { return int(r.grid(1 << 30).blocks) }

// QuantizedChunks returns how many elements of a share are in a chunk of a quantized all-reduce, and the grid.
func (r *Rank) QuantizedChunks(n int) (length, blocks, threads int) {
	length, g := r.quantizedChunks(n)
	return length, int(g.blocks), int(g.threads)
}

// Pushes reports whether r executes only Pushed.
func (r *Rank) Pushes() bool { return r.pusher != nil }

// Clear reports whether r, which pushes, accepts the marks of other ranks.
func (r *Rank) Clear() bool { return atomic.LoadUint32(r.pusher.flags.flag(r.rank, clearFlag)) != 0 }

// Sizes returns the bytes of a slot and of the whole in the scratch memory of r.
func (r *Rank) Sizes() (slot, whole int) { return r.slot, r.whole }
