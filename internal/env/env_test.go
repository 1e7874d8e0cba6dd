package env

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/ENVIRONMENT.md")

const document = "../../docs/ENVIRONMENT.md"

func TestDocument(t *testing.T) {
	if *update {
		require.NoError(t, os.WriteFile(document, []byte(Document()), 0o644))
	}
	have, err := os.ReadFile(document)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("docs/ is not here: this is not a checkout")
	}
	require.NoError(t, err)
	require.Equal(t, Document(), string(have), "run `make generate`")
}

func TestDeclarations(t *testing.T) {
	seen := map[string]bool{}
	for _, v := range All() {
		owned := false
		for _, prefix := range []string{"CHORUS_", "PYTORCH_", "TORCH_", "CUDA_", "CUBLAS_"} {
			owned = owned || strings.HasPrefix(v.Name, prefix)
		}
		foreign := []*Var{NVTXInjection, ThresholdGBps, MessageSizes, TestSizeMB, GangTimeoutSeconds} // of NVIDIA's tools
		require.True(t, owned || slices.Contains(foreign, v), v.Name)
		require.False(t, seen[v.Name], "%s is declared twice", v.Name)
		seen[v.Name] = true
		require.NotEmpty(t, v.Type, v.Name)
		require.True(t, strings.HasSuffix(v.Meaning, "."), "%s: the meaning is a sentence", v.Name)
	}
}

func TestValues(t *testing.T) {
	v := &Var{Name: "CHORUS_TEST_VALUE", Default: "7"}
	n, err := v.Int()
	require.NoError(t, err)
	require.Equal(t, 7, n)
	require.False(t, v.IsSet())
	t.Setenv(v.Name, "many")
	require.True(t, v.IsSet())
	_, err = v.Int()
	require.EqualError(t, err, `env: CHORUS_TEST_VALUE="many": want a whole number`)
	_, err = v.IntWhere("3 or more", func(n int) bool { return n >= 3 })
	require.EqualError(t, err, `env: CHORUS_TEST_VALUE="many": want 3 or more`)
	_, err = v.Duration()
	require.ErrorContains(t, err, "a duration such as 30s")
	_, err = v.OneOf("few", "some")
	require.ErrorContains(t, err, "one of few, some")
	_, err = v.Uint64()
	require.Error(t, err)
	t.Setenv(v.Name, "1m30s")
	d, err := v.Duration()
	require.NoError(t, err)
	require.Equal(t, 90*time.Second, d)
	t.Setenv(v.Name, "0xff")
	u, err := v.Uint64()
	require.NoError(t, err)
	require.EqualValues(t, 255, u)
}
