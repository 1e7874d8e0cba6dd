package comm_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A rank without pending operations writes its flight recorder too when a rank is lost: others
// may wait for it. Close does so if it comes before the function that watches the job.
func TestLossLeavesTraces(t *testing.T) {
	for name, early := range map[string]bool{"watched": false, "closed first": true} {
		t.Run(name, func(t *testing.T) {
			prefix := filepath.Join(t.TempDir(), "trace-")
			t.Setenv(env.NCCLTraceFile.Name, prefix)
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
			ctx, lose := context.WithCancel(context.Background())
			defer lose()
			var job context.Context = ctx
			if early {
				job = lateContext{ctx}
			}
			gs := joined(t, job, devs)
			lose()
			for rank, g := range gs {
				if early {
					require.NoError(t, g.Close())
				}
				var text []byte
				require.Eventually(t, func() (ok bool) {
					text, _ = os.ReadFile(prefix + string(rune('0'+rank)))
					return len(text) > 0
				}, time.Minute, time.Millisecond)
				require.Contains(t, string(text), `"world_ranks":[0,1],"world_size":2`)
			}
		})
	}
}
