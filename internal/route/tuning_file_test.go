package route

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTuningsAtOnce saves tunings for many places in one file at the same time.
func TestTuningsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	tuning := &Tuning{For: Site{GPU: "x"}, Choices: []Choice{
		{Operation: "all-gather", Bytes: 16, Times: []Timing{{Strategy: NCCLOnly}, {Strategy: OwnKernels, Micros: 1}}},
		{Operation: "all-reduce", Type: "float32", Reduction: "sum", Bytes: 16, Times: []Timing{{Strategy: OneShot}}},
	}}
	var wg sync.WaitGroup
	for ranks := range 20 {
		wg.Go(func() {
			one := Tuning{For: tuning.For, Choices: slices.Clone(tuning.Choices)}
			one.For.Ranks = ranks
			require.NoError(t, one.Save(t.Context(), file))
		})
	}
	wg.Wait()
	at := tuning.For
	for at.Ranks = range 20 {
		one, err := LoadTuning(file, at)
		require.NoError(t, err)
		require.NotNil(t, one, "for %d ranks", at.Ranks)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// TestTuningWhereAnotherWrites waits for another process no longer than ctx lets it.
func TestTuningWhereAnotherWrites(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	folder, err := os.Open(filepath.Dir(file))
	require.NoError(t, err)
	defer folder.Close()
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_EX))
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cancel(enough)
	require.ErrorIs(t, CanSave(ctx, file), enough)
	require.ErrorIs(t, (&Tuning{}).Save(ctx, file), enough)
	require.NoFileExists(t, file)
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_UN))
	require.NoError(t, (&Tuning{}).Save(t.Context(), file))
}
