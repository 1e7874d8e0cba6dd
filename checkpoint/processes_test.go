package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

// TestProcessesLoadAndSave is a process of a job when these say what it does, in which
// folder, and from which seed.
const (
	deedVar   = "GDS_TEST_DEED"
	folderVar = "GDS_TEST_FOLDER"
	seedVar   = "GDS_TEST_SEED"
)

func workInJob(t *testing.T, deed string) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	sess, err := cluster.Attach(ctx)
	require.NoError(t, err)
	defer sess.Close()
	dev, err := device.Open(sess.LocalRank())
	require.NoError(t, err)
	g, err := comm.Join(ctx, sess, dev, nil)
	require.NoError(t, err)
	var seed uint64
	fmt.Sscan(os.Getenv(seedVar), &seed)
	tensors := jobTensors(seed)
	switch how, is := strings.CutPrefix(deed, "save "); {
	case deed == "move":
		messageTimeout = 0 // a ctx that has not ended gives the others all the time they need
		moveTogether(t, ctx, g, tensors, seed)
	case deed == savesModel:
		saveModel(t, ctx, g, os.Getenv(folderVar), seed)
	case deed == restoresModel:
		restoreModel(t, ctx, g, os.Getenv(folderVar), seed)
	case deed == "state":
		saveInJob(t, ctx, g, seed)
	case deed == "lost":
		loseRank(t, ctx, g)
		return
	case deed == "lost restore":
		loseRankInRestore(t, ctx, g)
		return
	case is:
		failSaving(t, ctx, g, how, tensors)
	default:
		failTogether(t, ctx, g, deed, tensors)
	}
	require.NoError(t, g.Shutdown(ctx), "the group still works")
	require.NoError(t, sess.Shutdown(ctx))
}

// jobTensors are those of a job: small ones, and one that is read alone.
func jobTensors(seed uint64) []made {
	big := made{safetensors.Tensor{Name: "big", DType: safetensors.U8, Shape: []int{300, 1000}}, randomBytes(300_000)}
	return append(randomTensors(rand.New(rand.NewPCG(seed, 3)), 30), big)
}

// moveTogether loads by random plans and compares, and saves what nobody lacks.
func moveTogether(t *testing.T, ctx context.Context, g *comm.Group, tensors []made, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 4)) // alike in all processes
	folder := os.Getenv(folderVar)
	for i := range 4 {
		wishes := map[string]wish{}
		whole := map[string]Placement{}
		for _, m := range tensors {
			wishes[m.info.Name] = randomWish(r, m.info, g.Size())
			if n := len(m.info.Shape); n > 0 {
				whole[m.info.Name] = Shard(r.IntN(n))
			}
		}
		round := 512 << r.IntN(9)
		c := openCheckpoint(t, folder)
		all, err := c.Load(ctx, g, &LoadConfig{RoundBytes: round, Plan: func(i Info) Placement { return wishes[i.Name].placement }})
		require.NoError(t, err)
		for _, m := range tensors {
			w := wishes[m.info.Name]
			w.to = 0
			checkPart(t, all[0], m, w, g.Rank(), g, 0)
		}
		require.NoError(t, all[0].Close())

		all, err = c.Load(ctx, g, &LoadConfig{Plan: func(i Info) Placement { return whole[i.Name] }})
		require.NoError(t, err)
		path := filepath.Join(folder, fmt.Sprintf("saved-%d", i), "model.safetensors")
		if g.Rank() == 0 {
			require.NoError(t, os.Mkdir(filepath.Dir(path), 0o755))
		}
		require.NoError(t, g.Barrier(ctx))
		require.NoError(t, Save(ctx, g, path, all, &SaveConfig{RoundBytes: round, MaxFileBytes: int64(20000 * (i % 2))}))
		require.NoError(t, all[0].Close())
		files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*.safetensors"))
		require.NoError(t, err)
		got := readBack(t, files...)
		require.Len(t, got, len(tensors))
		for _, m := range tensors {
			require.Equal(t, append([]byte{}, m.data...), append([]byte{}, got[m.info.Name].data...), "%v", m.info)
		}
	}
}

// failTogether lets rank 1 fail in one way; each rank prints its error. The group is
// not broken by it.
func failTogether(t *testing.T, ctx context.Context, g *comm.Group, deed string, tensors []made) {
	bad := g.Rank() == 1
	c := openCheckpoint(t, os.Getenv(folderVar))
	cfg := &LoadConfig{RoundBytes: 512}
	failing, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if deed == "cannot read its own" { // which goes straight to it, without any round
		cfg.Plan = func(i Info) Placement {
			if i.Name == "big" {
				return Own(1)
			}
			return Skip()
		}
	}
	switch {
	case !bad:
	case deed == "other plan":
		cfg.Plan = func(Info) Placement { return Own(0) }
	case deed == "other rounds":
		cfg.RoundBytes = 1024
	case deed == "no such dimension":
		cfg.Plan = func(Info) Placement { return Shard(99) }
	case deed == "cancelled":
		cfg.Progress = func(done, total int64) { cancel(errors.New("no more time")) }
	case strings.HasPrefix(deed, "cannot read"):
		for _, f := range c.files {
			files.Of(f).System().Pread = func(_ int, _ []byte, off int64) (int, error) { return 0, os.ErrPermission }
		}
	}
	all, err := c.Load(failing, g, cfg)
	require.Error(t, err)
	require.Empty(t, all, "nothing half-loaded is handed out")
	fmt.Println("load says:", strings.ReplaceAll(err.Error(), "\n", " "))
	var e *RankError
	if errors.As(err, &e) {
		fmt.Println("rank error of rank", e.Rank, "with its cause:", e.Err != nil)
	}

	// The same processes go on.
	all, err = c.Load(ctx, g, nil)
	if strings.HasPrefix(deed, "cannot read") {
		require.Error(t, err)
		return
	}
	require.NoError(t, err)
	for _, m := range tensors {
		checkPart(t, all[0], m, wish{dim: -1, has: func(int) bool { return true }}, g.Rank(), g, 0)
	}
	require.NoError(t, all[0].Close())
}

// failSaving lets one rank fail while all save; nothing is left of the file, and the
// same processes save it then.
func failSaving(t *testing.T, ctx context.Context, g *comm.Group, deed string, tensors []made) {
	bad := g.Rank() == 1
	folder := filepath.Join(os.Getenv(folderVar), "saved")
	path := filepath.Join(folder, "model.safetensors")
	if g.Rank() == 0 {
		require.NoError(t, os.Mkdir(folder, 0o755))
	}
	c := openCheckpoint(t, os.Getenv(folderVar))
	cut := &LoadConfig{Plan: func(i Info) Placement {
		if len(i.Shape) == 0 {
			return Replicate()
		}
		return Shard(-1)
	}}
	all, err := c.Load(ctx, g, cut)
	require.NoError(t, err)
	cfg := &SaveConfig{RoundBytes: 512}
	failing, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	switch {
	case deed == "to no folder":
		path = filepath.Join(folder, "gone", "model.safetensors")
	case deed == "where a folder comes" && g.Rank() == 0:
		cfg.Progress = func(done, total int64) { _ = os.Mkdir(path, 0o755) }
	case !bad:
	case deed == "too late":
		cancel(errors.New("no more time"))
	case deed == "cancelled":
		cfg.Progress = func(done, total int64) { cancel(errors.New("no more time")) }
	case deed == "in other files":
		cfg.MaxFileBytes = 5000
	case deed == "closed weights":
		require.NoError(t, all[0].Close())
	}
	err = Save(failing, g, path, all, cfg)
	require.Error(t, err)
	fmt.Println("save says:", strings.ReplaceAll(err.Error(), "\n", " "))
	require.NoError(t, g.Barrier(ctx))
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	for _, x := range left {
		require.True(t, x.IsDir(), "%s is left", x.Name())
	}
	require.NoError(t, all[0].Close())

	all, err = c.Load(ctx, g, cut)
	require.NoError(t, err)
	path = filepath.Join(folder, "again.safetensors")
	require.NoError(t, Save(ctx, g, path, all, nil))
	require.Len(t, readBack(t, path), len(tensors))
	require.NoError(t, all[0].Close())
}

// runJob runs the test binary in several processes.
func runJob(t *testing.T, backend, deed string, ranks int) (code int, out string) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return runJobIn(t, backend, deed, ranks, writeCheckpoint(t, [][]made{jobTensors(seed)}), seed)
}

// runJobIn is runJob with a folder that the processes see, and a seed that they have in common.
func runJobIn(t *testing.T, backend, deed string, ranks int, folder string, seed uint64) (code int, out string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	var text bytes.Buffer
	code = launch.Run(testgpu.Context(t), &launch.Config{
		Program: []string{self, "-test.run=^TestProcessesLoadAndSave$", "-test.v"},
		Procs:   ranks,
		Devices: launch.Devices{Count: ranks, Backend: backend, Env: []string{
			deedVar + "=" + deed, folderVar + "=" + folder, seedVar + "=" + fmt.Sprint(seed), "CHORUS_BACKEND=" + backend}},
		Grace:   time.Minute,                                                     // all end by themselves
		Cluster: job.Config{Timing: cluster.Timing{LostAfter: 30 * time.Second}}, // a kill is noticed at once
		Stdout:  &text,
		Stderr:  &text,
	})
	return code, text.String()
}

// backends calls fn with how many processes there are.
func backends(t *testing.T, virtual int, fn func(t *testing.T, backend string, ranks int)) {
	t.Run("virtual", func(t *testing.T) { fn(t, "virtual", virtual) })
	t.Run("cuda", func(t *testing.T) { testgpu.CUDA(t, 2); fn(t, "cuda", 2) })
}

func TestProcessesLoadAndSave(t *testing.T) {
	if deed := os.Getenv(deedVar); deed != "" {
		workInJob(t, deed)
		return
	}
	backends(t, 3, func(t *testing.T, backend string, ranks int) {
		code, out := runJob(t, backend, "move", ranks)
		require.Zero(t, code, out)
	})
}

// TestProcessesFailTogether: what goes wrong in one process ends the call in all of
// them, which say where and why and can go on.
func TestProcessesFailTogether(t *testing.T) {
	for deed, says := range map[string]string{
		"other plan":          `rank \d has another plan, other files or other options`,
		"other rounds":        `rank \d has another plan, other files or other options`,
		"no such dimension":   `rank 1: load .*: tensor "(t\.\d+|big)": .*(dimension 99|no dimension)`,
		"cancelled":           `rank 1: .*no more time`,
		"cannot read its own": `rank 1: load .*part-0.safetensors: tensor "big" at byte \d+: .*permission`,
		"cannot read":         `rank 1: load .*part-0.safetensors: tensor "(t\.\d+|big)" at byte \d+: .*permission`,
	} {
		t.Run(deed, func(t *testing.T) {
			backends(t, 3, func(t *testing.T, backend string, ranks int) {
				code, out := runJob(t, backend, deed, ranks)
				require.Zero(t, code, out)
				for rank := range ranks {
					require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] load says: checkpoint: load.*%s`, rank, says), out)
					if !strings.HasPrefix(deed, "other ") {
						require.Contains(t, out, fmt.Sprintf("[rank %d] rank error of rank 1 with its cause: %v", rank, rank == 1), out)
					}
				}
			})
		})
	}
}

// TestProcessesFailSaving: a rank that fails at any step of saving ends it for all,
// who say where and why; nothing is left, and they can go on.
func TestProcessesFailSaving(t *testing.T) {
	for deed, says := range map[string]string{
		"too late":             `rank 1: .*no more time`,
		"cancelled":            `rank 1: .*/model\.safetensors[: ].*no more time`,
		"in other files":       `rank \d has another plan, other files or other options`,
		"closed weights":       `rank 1: save .*closed`,
		"to no folder":         `rank 0: create .*model.safetensors: no such file`,
		"where a folder comes": `rank 0: commit .*model.safetensors: .*(exists|directory)`,
	} {
		t.Run(deed, func(t *testing.T) {
			backends(t, 3, func(t *testing.T, backend string, ranks int) {
				code, out := runJob(t, backend, "save "+deed, ranks)
				require.Zero(t, code, out)
				for rank := range ranks {
					require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] save says: checkpoint: save.*%s`, rank, says), out)
				}
			})
		})
	}
}
