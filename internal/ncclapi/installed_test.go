package ncclapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

// The installed library has exactly the functions that the table says its
// version has.
func TestInstalledLibrary(t *testing.T) {
	l, err := Open()
	dltest.RequireInstalled(t, err)
	t.Logf("NCCL %s at %s", VersionText(l.Version()), l.Path())
	for f := range NumFuncs {
		require.Equal(t, l.Version() >= f.Since(), l.Has(f), "%s, since %s", f.Name(), VersionText(f.Since()))
	}
	_ = l.GetLastError(0) // must not fail for want of a communicator
	_, r := l.CommCount(0)
	require.Equal(t, InvalidArgument, r)
}
