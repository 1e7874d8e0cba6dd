package checkpoint

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// lostModel is cut by rows in the checkpoint and by columns in memory, so that all ranks need
// rows of all others, in several rounds.
func lostModel() []stateTensor {
	var model []stateTensor
	for i := range 8 {
		x := stateTensor{name: fmt.Sprint("layer.", i), shape: []int{12, 40}}
		for k := range 480 {
			x.want = append(x.want, int32(1000*i+k))
		}
		model = append(model, x)
	}
	return model
}

func saveLostModel(t *testing.T, ctx context.Context, g *comm.Group, folder string) {
	parts, _ := layOutParts(t, rand.New(rand.NewPCG(1, 1)), g, lostModel(), true)
	v, err := NewSaver(ctx, g, folder, parts, nil)
	require.NoError(t, err)
	require.NoError(t, v.Save(ctx, 3, groupStreams(g)))
	require.NoError(t, v.Close())
}

// columns are the parts of lostModel's columns.
func columns(t *testing.T, g *comm.Group) (parts [][]Part, wants [][][]int32) {
	for i := range g.Locals() {
		rank, width := g.Communicator(i).Rank(), 40/g.Size()
		parts, wants = append(parts, nil), append(wants, nil)
		for _, x := range lostModel() {
			var want []int32
			for row := range 12 {
				at := 40*row + width*rank
				want = append(want, x.want[at:at+width]...)
			}
			data := makeTensor(t, g.Stream(i), make([]int32, len(want)), []int{12, width})
			parts[i] = append(parts[i], Part{Name: x.name, Shape: x.shape, Dim: 1, Start: width * rank, Data: data})
			wants[i] = append(wants[i], want)
		}
	}
	return parts, wants
}

// onRead calls fn before read number n of a checkpoint's files by this process.
func onRead(s *Saved, n int64, fn func()) *atomic.Int64 {
	reads := new(atomic.Int64)
	for _, f := range s.files.files {
		system := files.Of(f).System()
		before := system.Pread
		system.Pread = func(fd int, b []byte, off int64) (int, error) {
			if reads.Add(1) == n {
				fn()
			}
			return before(fd, b, off)
		}
	}
	return reads
}

// openLostModel opens the checkpoint of saveLostModel.
func openLostModel(t *testing.T, folder string) *Saved {
	s, err := OpenSaved(filepath.Join(folder, stepName(3)))
	require.NoError(t, err)
	return s
}

// TestLostRankEndsARestore aborts a rank at any read of a Restore. The error names the rank and
// comes soon, nothing leaks, and a new group restores.
func TestLostRankEndsARestore(t *testing.T) {
	onVirtual(t, 4, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		saveLostModel(t, t.Context(), localGroup(t, devs[:3]), folder)
		failed := 0
		lose := func(at int64) (ends bool) {
			g := localGroup(t, devs)
			parts, _ := columns(t, g)
			s := openLostModel(t, folder)
			defer func() { require.NoError(t, s.Close()) }()
			held := heldMemory(t, devs)
			reads := onRead(s, at, func() { _ = g.Communicator(2).Abort() })
			begun := time.Now()
			_, err := s.Restore(testgpu.Context(t), g, parts, &RestoreConfig{RoundBytes: 2000})
			_ = g.Close()
			require.Less(t, time.Since(begun), 20*time.Second, "read %d", at)
			if reads.Load() < at {
				require.NoError(t, err)
				return true
			}
			if err != nil {
				failed++
				require.ErrorContains(t, err, "rank 2", "read %d", at)
			}
			require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return fmt.Sprint(heldMemory(t, devs)) == fmt.Sprint(held) }), "read %d: memory", at)
			return false
		}
		lose(1)
		routines := runtime.NumGoroutine()
		for at := int64(1); !lose(at); at++ {
		}
		require.Greater(t, failed, 4)
		require.Empty(t, openBelow(t, folder))
		g := localGroup(t, devs)
		parts, wants := columns(t, g)
		s := openLostModel(t, folder)
		defer s.Close()
		_, err := s.Restore(t.Context(), g, parts, nil)
		require.NoError(t, err)
		checkParts(t, g, parts, wants)
		require.NoError(t, g.Close())
		require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return runtime.NumGoroutine() <= routines }), "goroutines")
	})
}

// openBelow returns the files of a folder that the process has open.
func openBelow(t *testing.T, folder string) (all []string) {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, folder) {
			all = append(all, to)
		}
	}
	return all
}

func heldMemory(t *testing.T, devs []*device.Device) (all []int64) {
	for _, d := range devs {
		n, err := memory.Allocated(d)
		require.NoError(t, err)
		all = append(all, n)
	}
	return all
}

// loseRankInRestore kills the last rank in a round of the Restore. The other ranks print their errors, and
// restore in a group of their own process.
func loseRankInRestore(t *testing.T, ctx context.Context, g *comm.Group) {
	folder := filepath.Join(os.Getenv(folderVar), "run")
	saveLostModel(t, ctx, g, folder)
	parts, _ := columns(t, g)
	s := openLostModel(t, folder)
	defer s.Close()
	pids, err := comm.GatherValues(ctx, g, nil, os.Getpid())
	require.NoError(t, err)
	if g.Rank() == 0 { // which reads a file in each round
		onRead(s, 5, func() { _ = syscall.Kill(pids[g.Size()-1], syscall.SIGKILL) })
	}
	begun := time.Now()
	_, err = s.Restore(ctx, g, parts, &RestoreConfig{RoundBytes: 2000})
	fmt.Println("restore says:", strings.ReplaceAll(err.Error(), "\n", " "))
	require.Less(t, time.Since(begun), 20*time.Second)
	alone := localGroup(t, []*device.Device{g.Device(0)})
	parts, wants := columns(t, alone)
	_, err = s.Restore(ctx, alone, parts, nil)
	require.NoError(t, err)
	checkParts(t, alone, parts, wants)
	fmt.Println("restored alone")
}

// TestKilledRankEndsARestore kills a process during a Restore.
func TestKilledRankEndsARestore(t *testing.T) {
	backends(t, 4, func(t *testing.T, backend string, ranks int) {
		code, out := runJob(t, backend, "lost restore", ranks)
		require.NotZero(t, code, out)
		for rank := range ranks - 1 {
			require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] restore says: checkpoint: .*rank %d`, rank, ranks-1), out)
			require.Contains(t, out, fmt.Sprintf("[rank %d] restored alone", rank))
		}
	})
}
