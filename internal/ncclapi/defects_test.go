package ncclapi_test

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/ncclapi"
)

var source = regexp.MustCompile(`^(release notes of NCCL \d+\.\d+\.\d+|nccl#\d+)`)

// Each row is complete, and its sentences fit together as the outputs join them.
func TestRows(t *testing.T) {
	seen := map[string]bool{}
	for _, d := range ncclapi.Defects {
		require.False(t, seen[d.ID], d.ID)
		seen[d.ID] = true
		require.Regexp(t, `^[a-z]+(-[a-z]+)*$`, d.ID)
		require.Regexp(t, source, d.Source, d.ID)
		require.True(t, d.Before == 0 || d.From < d.Before, d.ID)
		for _, s := range []string{d.Fault, d.When, d.Chorus} {
			require.NotEmpty(t, s, d.ID)
			require.NotRegexp(t, `\.$|^when `, s, d.ID)
		}
	}
}

func TestVersions(t *testing.T) {
	ids := func(version int32) (list []string) {
		for _, d := range ncclapi.DefectsOf(version) {
			list = append(list, d.ID)
		}
		return list
	}
	require.Contains(t, ids(22803), "symmetric-in-graphs")
	require.Contains(t, ids(23004), "symmetric-in-graphs")
	require.NotContains(t, ids(23007), "symmetric-in-graphs", "2.30.7 restored the dependency")
	require.NotContains(t, ids(22705), "symmetric-in-graphs", "2.28 lost it")
	require.Contains(t, ids(22903), "one-rank")
	require.NotContains(t, ids(22907), "one-rank")
	require.NotContains(t, ids(23003), "nvls-start")
	require.Contains(t, ids(23004), "nvls-start")
	require.Equal(t, []string{"split-with-threads"}, ids(23206), "no version without it is known")
	list := ncclapi.DefectsOf(22803)
	require.True(t, list[0].Open)
	require.False(t, list[len(list)-1].Open, "those that Chorus avoids come last")
}

func TestRange(t *testing.T) {
	for want, d := range map[string]ncclapi.Defect{
		"2.28.3 to before 2.30.7": {From: 22803, Before: 23007},
		"before 2.29.7":           {Before: 22907},
		"2.24.3 and newer":        {From: 22403},
		"2.30.4":                  {From: 23004, Before: 23005},
		"all known versions":      {},
	} {
		require.Equal(t, want, d.Range())
	}
}
