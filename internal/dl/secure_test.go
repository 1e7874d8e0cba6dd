package dl

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

// A program with rights that its starter does not have opens no library that the starter
// has named.
func TestSecureIgnoresEnvironment(t *testing.T) {
	chosen := &env.Var{Name: "CHORUS_TEST_LIBRARY"}
	t.Setenv(chosen.Name, "/planted/lib.so")
	spec := &Spec{Name: "test", Env: chosen, Sonames: []string{"libchorus-none.so.1"}, Folders: []string{"$CUDA_HOME/lib", "$LD_LIBRARY_PATH"}}
	t.Setenv("CUDA_HOME", "/planted")
	_, err := open(spec, host())
	require.ErrorContains(t, err, "/planted/lib.so")
	_, err = open(spec, secureHost())
	require.Error(t, err)
	require.NotContains(t, err.Error(), "/planted")
}
