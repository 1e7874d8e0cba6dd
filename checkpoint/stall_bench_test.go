package checkpoint_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var (
	stallBytes  = flag.Int64("stall.bytes", 0, "`bytes` of state that BenchmarkStall saves; 0 is 12 GB on a GPU and 16 MB without one")
	stallFolder = flag.String("stall.folder", "", "`folder` on the disk that BenchmarkStall writes to; empty is a temporary one")
)

// BenchmarkStall measures what a save costs a training whose step is one graph that changes the
// whole state (testdata/torch_stall.py has the same step). One iteration is one save.
//
//	step-ms     median step without a save
//	stall-ms    longest step from the save to the end of its files, less step-ms
//	copy-ms     the bytes of the state at the measured rate to pinned memory
//	other-ms    longest step of those after the first, less the longest one without a save
//	durable-s   from the save until the checkpoint is on the disk and visible
//	disk-s      the same bytes, written and synced by four goroutines to one file each
//	disk1-s     the same by one goroutine
func BenchmarkStall(b *testing.B) {
	b.Run("cuda", func(b *testing.B) { benchStall(b, testgpu.CUDA(b, 1)[0], 12_000_000_000) })
	b.Run("virtual", func(b *testing.B) {
		benchStall(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 1})[0], 16_000_000)
	})
}

// A loop is a training whose step is a graph: it copies a tensor to all others, again and again.
type loop struct {
	b     *testing.B
	g     *comm.Group
	s     *stream.Stream
	state []memory.Slice[float32]
	exec  *graph.Exec
}

// tensorsOfState is the number of equally long tensors.
const tensorsOfState = 64

func newLoop(b *testing.B, dev *device.Device, bytes int64) *loop {
	g, err := comm.Local(context.Background(), []*device.Device{dev}, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, g.Close()) })
	l := &loop{b: b, g: g}
	l.s, err = stream.New(dev, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, l.s.Close()) })
	for range tensorsOfState {
		x, err := memory.Make[float32](l.s, int(bytes/4/tensorsOfState))
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, x.Close()) })
		require.NoError(b, x.Zero(l.s))
		l.state = append(l.state, x)
	}
	l.exec, err = graph.Capture([]*stream.Stream{l.s}, func() error {
		for range 4 { // long enough for a step of a model
			for _, x := range l.state[1:] {
				if err := memory.Copy(l.s, x, l.state[0]); err != nil {
					return err
				}
			}
		}
		return nil
	}, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, l.exec.Close()) })
	return l
}

// step runs before, then a step, and returns how long both take.
func (l *loop) step(before func() error) time.Duration {
	begun := time.Now()
	if before != nil {
		require.NoError(l.b, before())
	}
	require.NoError(l.b, l.exec.Launch(l.s))
	require.NoError(l.b, l.s.Sync(context.Background()))
	return time.Since(begun)
}

func (l *loop) parts() [][]checkpoint.Part {
	all := make([][]checkpoint.Part, 1)
	for i, x := range l.state {
		data, err := tensor.Of(x, x.Len())
		require.NoError(l.b, err)
		all[0] = append(all[0], checkpoint.Part{Name: "state." + string(rune('A'+i)), Data: data})
	}
	return all
}

func benchStall(b *testing.B, dev *device.Device, bytes int64) {
	if *stallBytes > 0 {
		bytes = *stallBytes
	}
	folder := *stallFolder
	if folder == "" {
		folder = b.TempDir()
	}
	l := newLoop(b, dev, bytes)
	rate := l.copyRate()
	disk1, disk := writeTime(b, folder, bytes, 1), writeTime(b, folder, bytes, 4)
	v, err := checkpoint.NewSaver(context.Background(), l.g, filepath.Join(folder, "run"), l.parts(), &checkpoint.SaverConfig{KeepLast: 1})
	require.NoError(b, err)
	defer v.Close()
	var quiet []time.Duration
	for range 30 {
		quiet = append(quiet, l.step(nil))
	}
	slices.Sort(quiet)
	median, worst := quiet[len(quiet)/2], quiet[len(quiet)-1]
	var stall, other, durable []float64
	n := int64(0)
	for b.Loop() {
		n++
		begun := time.Now()
		first := l.step(func() error { return v.Save(context.Background(), n, []*stream.Stream{l.s}) })
		later := time.Duration(0)
		for !v.Progress().Complete {
			later = max(later, l.step(nil))
		}
		durable = append(durable, time.Since(begun).Seconds())
		require.NoError(b, v.Wait(context.Background()))
		stall, other = append(stall, ms(max(first, later)-median)), append(other, ms(later-worst))
	}
	b.ReportMetric(ms(median), "step-ms")
	b.ReportMetric(slices.Max(stall), "stall-ms")
	b.ReportMetric(1000*float64(bytes)/rate, "copy-ms")
	b.ReportMetric(slices.Max(other), "other-ms")
	b.ReportMetric(mean(durable), "durable-s")
	b.ReportMetric(disk.Seconds(), "disk-s")
	b.ReportMetric(disk1.Seconds(), "disk1-s")
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(len(xs))
}

// copyRate returns the rate of a copy of one tensor to pinned memory, in bytes a second.
func (l *loop) copyRate() float64 {
	x := l.state[0]
	host, err := memory.MakePinned[float32](l.s.Device(), x.Len())
	require.NoError(l.b, err)
	defer func() { require.NoError(l.b, host.Close()) }()
	require.NoError(l.b, l.s.Sync(context.Background()))
	const copies = 20
	begun := time.Now()
	for range copies {
		require.NoError(l.b, x.CopyToPinned(l.s, host))
	}
	require.NoError(l.b, l.s.Sync(context.Background()))
	return copies * float64(x.Bytes()) / time.Since(begun).Seconds()
}

// writeTime returns the time to write bytes to as many files as there are writers, and to sync
// them.
func writeTime(b *testing.B, folder string, bytes int64, writers int) time.Duration {
	data := make([]byte, 16<<20)
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	errs := make([]error, writers)
	begun := time.Now()
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			errs[i] = writeAndSync(filepath.Join(folder, "write"+string(rune('A'+i))), data, bytes/int64(writers))
		})
	}
	all.Wait()
	took := time.Since(begun)
	for i, err := range errs {
		require.NoError(b, err)
		require.NoError(b, os.Remove(filepath.Join(folder, "write"+string(rune('A'+i)))))
	}
	return took
}

func writeAndSync(path string, data []byte, bytes int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for left := bytes; left > 0; left -= int64(len(data)) {
		if _, err := f.Write(data[:min(int64(len(data)), left)]); err != nil {
			return err
		}
	}
	return f.Sync()
}
