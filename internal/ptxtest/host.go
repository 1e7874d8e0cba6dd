package ptxtest

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/gochorus/chorus/internal/cudahost"
)

// Host compiles C++ for this machine and returns the program. It skips the test
// without a suitable compiler.
func Host(t *testing.T, code string, flags ...string) (program string) {
	t.Helper()
	program, err := cudahost.Build(t.Context(), t.TempDir(), code, flags...)
	switch {
	case err == nil:
	case errors.Is(err, exec.ErrNotFound), strings.Contains(err.Error(), "has no _Float16"), strings.Contains(err.Error(), "_Float16’ was not declared"):
		t.Skip("needs a C++ compiler with _Float16, g++: ", err)
	default:
		t.Fatal(err)
	}
	return program
}
