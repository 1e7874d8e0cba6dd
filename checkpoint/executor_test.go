package checkpoint

import (
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
)

// A move begins when the one before has nothing left to begin, and the one before that
// has ended.
func TestSequencer(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		var r sequencer
		var done [4]bool
		var holds, starts [3]chan struct{}
		for i := range holds {
			holds[i], starts[i] = make(chan struct{}), make(chan struct{})
		}
		begun := 0
		go func() {
			for i := range holds {
				r.run(func(allStarted func()) {
					begun = i + 1
					<-starts[i]
					allStarted()
					allStarted()
					<-holds[i]
					done[i] = true
				})
			}
			r.wait()
			done[3] = true
		}()
		expect := func(n int, what ...bool) {
			t.Helper()
			synctest.Wait()
			require.Equal(t, n, begun)
			require.Equal(t, what, done[:])
		}
		expect(1, false, false, false, false)
		close(starts[0])
		expect(2, false, false, false, false)
		close(starts[1])
		expect(2, false, false, false, false)
		close(holds[0])
		expect(3, true, false, false, false)
		close(holds[2])
		close(holds[1])
		expect(3, true, true, false, false)
		close(starts[2])
		expect(3, true, true, true, true)

		r = sequencer{}
		r.run(func(func()) {}) // one that ends without a word
		r.wait()
		(&sequencer{}).wait()
	})
}

// A meeting is of a call of the system that waits and one that comes meanwhile.
type meeting struct {
	came chan struct{}
	once sync.Once
}

func newMeeting() *meeting { return &meeting{came: make(chan struct{})} }

func (m *meeting) come() { m.once.Do(func() { close(m.came) }) }

func (m *meeting) wait(t *testing.T) {
	select {
	case <-m.came:
	case <-time.After(time.Minute):
		t.Error("what follows has not begun")
	}
}

// between lets what is moved at the first bytes of the file wait for what is moved
// between two offsets.
func (m *meeting) between(t *testing.T, from, to int64, move files.Mover) files.Mover {
	return func(fd int, p []byte, off int64) (int, error) {
		if off < to && off+int64(len(p)) > from {
			m.come()
		}
		if off < 1<<10 {
			m.wait(t)
		}
		return move(fd, p, off)
	}
}

// TestRoundsOverlap: while the last bytes of a round are moved, the first ones of the
// next are, too. Here those of the first one wait for them.
func TestRoundsOverlap(t *testing.T) {
	const from, to = 2<<20 + 1<<10, 5 << 19 // of the same rank: the first half of the last tensor
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		g := localGroup(t, devs)
		c, err := Open([]string{folder}, &gds.FileConfig{Engine: gds.Cached, Threads: 2})
		require.NoError(t, err)
		defer c.Close()
		files.Of(c.files[0]).System().Pread = newMeeting().between(t, from, to, syscall.Pread)
		all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(1) }, RoundBytes: 1 << 20})
		require.NoError(t, err)
		for i, w := range all {
			for _, m := range list {
				x, err := w.Tensor(m.info.Name)
				require.NoError(t, err)
				require.Equal(t, partOf(m.data, 4, m.info.Shape, 1, i*256, 256), bytesOfTensor(t, x, g, i))
			}
		}

		path := filepath.Join(t.TempDir(), "model.safetensors")
		w, err := peersOf(g)
		require.NoError(t, err)
		s := newSaving(w, path, &SaveConfig{RoundBytes: 1 << 20, File: &gds.FileConfig{Engine: gds.Cached, Threads: 2}})
		require.NoError(t, s.begin(all))
		files.Of(s.files[0]).System().Pwrite = newMeeting().between(t, from, to, syscall.Pwrite)
		require.NoError(t, s.steps(t.Context(), nil))
		require.NoError(t, s.release())
		got := readBack(t, path)
		for _, m := range list {
			require.Equal(t, m.data, got[m.info.Name].data)
		}
		require.NoError(t, closeAll(all))
	})
}

// TestFilesOverlap: so it is with one file after the other.
func TestFilesOverlap(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		data := randomBytes(2 << 20)
		var parts [][]made
		for i, name := range []string{"a", "b"} {
			parts = append(parts, []made{{safetensors.Tensor{Name: name, DType: safetensors.U8, Shape: []int{1 << 20}}, data[i<<20 : (i+1)<<20]}})
		}
		c, err := Open([]string{writeCheckpoint(t, parts)}, &gds.FileConfig{Engine: gds.Cached, Threads: 2})
		require.NoError(t, err)
		defer c.Close()
		m := newMeeting()
		files.Of(c.files[0]).System().Pread = func(fd int, p []byte, off int64) (int, error) {
			if off < 1<<10 {
				m.wait(t)
			}
			return syscall.Pread(fd, p, off)
		}
		files.Of(c.files[1]).System().Pread = func(fd int, p []byte, off int64) (int, error) {
			m.come()
			return syscall.Pread(fd, p, off)
		}
		s := newStream(t, devs[0])
		w, err := c.LoadOn(t.Context(), s, nil)
		require.NoError(t, err)
		require.NoError(t, c.Verify(t.Context(), w))
		require.NoError(t, w.Close())
	})
}
