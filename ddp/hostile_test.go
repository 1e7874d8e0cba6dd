package ddp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/memory"
)

// What another rank says about its arguments ends no process, however it contradicts itself.
func TestHostileArguments(t *testing.T) {
	say := func(a arguments) collective.Said[arguments] { return collective.Said[arguments]{Value: a} }
	mine := arguments{What: "gradient", Lengths: []int{3, 4}, Types: []memory.DType{memory.Float32, memory.Float32}}
	for _, theirs := range []arguments{
		{Lengths: []int{3, 4}},
		{Lengths: []int{3, 4}, Types: mine.Types[:1]},
		{Lengths: []int{3, 4}, Types: []memory.DType{memory.Float32, 250}},
		{Given: "\x1b[2J\r"},
	} {
		for _, all := range [][]collective.Said[arguments]{{say(mine), say(theirs)}, {say(theirs), say(mine)}} {
			err := compare("new reducer", all)
			require.ErrorContains(t, err, "give the same on all ranks")
			require.NotContains(t, err.Error(), "\x1b")
		}
	}
	require.NoError(t, compare("new reducer", []collective.Said[arguments]{say(mine), say(mine)}))
}

// An order of gradients has each of them once.
func TestHostileOrder(t *testing.T) {
	require.True(t, isOrder([]int{2, 0, 1}, 3))
	require.True(t, isOrder(nil, 0))
	for _, order := range [][]int{nil, {0, 1}, {0, 1, 1}, {-1, 0, 1}, {0, 1, 3}, {0, 1, 2, 3}} {
		require.False(t, isOrder(order, 3), "%v", order)
	}
}
