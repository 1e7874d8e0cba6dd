//go:build !nolinkname

package dl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
)

func TestDirectAllocatesNothing(t *testing.T) {
	table := newDirect(t)
	require.Zero(t, testing.AllocsPerRun(100, func() { table.Direct(fnWeigh, &[dl.DirectWords]uintptr{1}) }))
}
