package dl

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

func TestSecure(t *testing.T) {
	vector := func(pairs ...uint64) (b []byte) {
		for _, n := range pairs {
			b = binary.NativeEndian.AppendUint64(b, n)
		}
		return b
	}
	require.True(t, isSecure(vector(6, 4096, atSecure, 1, 0, 0)))
	require.False(t, isSecure(vector(6, 4096, atSecure, 0, 0, 0)))
	require.False(t, isSecure(vector(6, 4096)))
	require.False(t, isSecure(nil))
	require.False(t, isSecure(vector(atSecure, 1)[:15]))
	real, err := os.ReadFile("/proc/self/auxv")
	require.NoError(t, err)
	require.False(t, isSecure(real))
	require.False(t, secure())
}

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

func FuzzIsSecure(f *testing.F) {
	f.Add([]byte{23, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) { isSecure(b) })
}
