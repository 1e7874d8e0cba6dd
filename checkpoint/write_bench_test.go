package checkpoint

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

var (
	writeBytes  = flag.Int64("write.bytes", 64<<20, "`bytes` of the file that BenchmarkSaverWrites writes")
	writeFolder = flag.String("write.folder", "", "`folder` on the disk that BenchmarkSaverWrites writes to; empty is a temporary one")
)

// BenchmarkSaverWrites measures how a Saver writes and syncs the file of a rank whose snapshot is in
// host memory.
//
//	save-s   the file of the Saver, with digests
//	disk-s   the same bytes, written to one file by four goroutines and synced
//	disk1-s  the same by one goroutine
func BenchmarkSaverWrites(b *testing.B) {
	folder := *writeFolder
	if folder == "" {
		folder = b.TempDir()
	}
	g := localGroup(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 1}))
	x, err := tensor.Make(g.Stream(0), memory.Uint8, int(*writeBytes))
	require.NoError(b, err)
	defer x.Close()
	v, err := NewSaver(b.Context(), g, filepath.Join(folder, "run"), [][]Part{{{Name: "x", Data: x}}}, nil)
	require.NoError(b, err)
	defer v.Close()
	write := func(step int64) time.Duration {
		job, _, err := v.start(b.Context(), step, groupStreams(g), nil)
		require.NoError(b, err)
		require.NoError(b, v.locals[0].snapshot(b.Context(), groupStreams(g)[0]))
		require.NoError(b, v.locals[0].side.Sync(b.Context()))
		begun := time.Now()
		require.NoError(b, v.writeFile(job, v.locals[0]))
		took := time.Since(begun)
		require.NoError(b, os.RemoveAll(job.temp))
		close(job.done)
		return took
	}
	write(0) // a virtual machine may get memory for its page cache only now
	var save, disk, disk1 time.Duration
	n := int64(0)
	for b.Loop() {
		n++
		save += write(n)
		disk += writeTime(b, folder, 4)
		disk1 += writeTime(b, folder, 1)
	}
	b.SetBytes(*writeBytes)
	b.ReportMetric(save.Seconds()/float64(n), "save-s")
	b.ReportMetric(disk.Seconds()/float64(n), "disk-s")
	b.ReportMetric(disk1.Seconds()/float64(n), "disk1-s")
}

// writeTime returns the time in which so many goroutines write and sync a file.
func writeTime(b *testing.B, folder string, writers int) time.Duration {
	data := randomBytes(16 << 20)
	f, err := os.Create(filepath.Join(folder, "plain"))
	require.NoError(b, err)
	begun, errs := time.Now(), make([]error, writers)
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			for off := int64(i * len(data)); off < *writeBytes && errs[i] == nil; off += int64(writers * len(data)) {
				_, errs[i] = f.WriteAt(data[:min(int64(len(data)), *writeBytes-off)], off)
			}
		})
	}
	all.Wait()
	err = f.Sync()
	took := time.Since(begun)
	require.NoError(b, errors.Join(append(errs, err, f.Close(), os.Remove(f.Name()))...))
	return took
}
