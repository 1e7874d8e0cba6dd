package dltest

import (
	"testing"

	"github.com/gochorus/chorus/internal/env"
)

// RequireInstalled skips a test of an installed library if err says that it
// could not be opened, or fails it where CHORUS_REQUIRE_GPU says that this
// machine has GPUs.
func RequireInstalled(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if n, _ := env.RequireGPU.Int(); n > 0 {
		t.Fatalf("%s=%d, but %v", env.RequireGPU.Name, n, err)
	}
	t.Skip(err)
}
