package checkpoint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The message of a rank is about its own parts only, and its error is a text that no terminal obeys.
func TestHostileReports(t *testing.T) {
	folder := t.TempDir()
	job := &saveJob{step: 1, id: "id", temp: filepath.Join(folder, tempPrefix+stepName(1)+"-id")}
	v := &Saver{folder: folder, cfg: SaverConfig{Timeout: time.Minute}, fs: systemFiles{folder}, ranks: 2, root: true}
	v.plan = &manifest{Ranks: 2, Files: []savedFile{{rank: 0}, {rank: 1}}, Tensors: []savedTensor{
		{Name: "a", Parts: []savedPart{{Key: "a", rank: 0}}}, {Name: "b", Parts: []savedPart{{Key: "b", rank: 1}}}}}
	require.NoError(t, v.fs.MkdirAll(job.temp))
	own, forged := strings.Repeat("0", 64), strings.Repeat("f", 64)
	require.NoError(t, writeReport(v.fs, job.temp, 0, &rankReport{Digests: map[string][]string{"a": {own}}, Header: own}))
	require.NoError(t, writeReport(v.fs, job.temp, 1, &rankReport{Digests: map[string][]string{"a": {forged}, "b": {own}}, Header: own}))
	m, err := v.collect(job)
	require.NoError(t, err)
	require.Equal(t, []string{own, own}, []string{m.Tensors[0].Parts[0].SHA256, m.Tensors[1].Parts[0].SHA256})

	require.NoError(t, writeReport(v.fs, job.temp, 0, &rankReport{Digests: map[string][]string{"b": {own}}, Header: own}))
	_, err = v.collect(job)
	require.ErrorContains(t, err, `rank 0 has not written tensor "a"`)

	for rank := range 2 {
		require.NoError(t, writeReport(v.fs, job.temp, rank, &rankReport{Error: "no\r\x1b[K" + strings.Repeat("x", 1<<20)}))
	}
	_, err = v.collect(job)
	_, told := v.rootMessage(job)
	for _, err := range []error{err, told} {
		require.ErrorContains(t, err, `no\x0d\x1b[K`)
		require.Less(t, len(err.Error()), 2*maxReason)
	}
	require.NoError(t, os.RemoveAll(job.temp))
}
