package cluster

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDetect reads environments: names and values in lines.
func FuzzDetect(f *testing.F) {
	for launcher, env := range oneHostEnvs {
		f.Add(strings.ReplaceAll(env, " ", "\n") + "\nCHORUS_LAUNCHER=" + launcher)
	}
	f.Add("SLURM_JOB_ID=100\nSLURM_PROCID=5\nSLURM_NTASKS=7\nSLURM_NODEID=1\nSLURM_STEP_NODELIST=g[01-02]\nSLURM_STEP_TASKS_PER_NODE=4,3")
	f.Add("CHORUS_RANK=1\nCHORUS_WORLD_SIZE=2\nCHORUS_ADDR=a:1\nCHORUS_TOKEN=" + testToken)
	f.Fuzz(func(t *testing.T, s string) {
		vars := map[string]string{}
		for line := range strings.SplitSeq(s, "\n") {
			if name, value, ok := strings.Cut(line, "="); ok && name != "CHORUS_SECRET_FILE" {
				vars[name] = value
			}
		}
		c, err := detect(func(n string) (string, bool) { v, ok := vars[n]; return v, ok })
		if err != nil {
			return
		}
		require.True(t, c.Rank == nil || *c.Rank >= 0 && *c.Rank < max(c.Size, 1))
		_, _ = c.complete()
	})
}
