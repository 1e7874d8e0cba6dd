package handle

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var one, two, three Key

func TestMap(t *testing.T) {
	var m Map
	_, ok := m.Load(&one)
	require.False(t, ok)
	_, err := m.LoadOrMake(&one, func() (any, error) { return 1, errors.New("not now") })
	require.EqualError(t, err, "not now")
	_, ok = m.Load(&one)
	require.False(t, ok, "what failed is not kept")
	for _, want := range []int{1, 1} {
		v, err := m.LoadOrMake(&one, func() (any, error) { return want, nil })
		require.NoError(t, err)
		require.Equal(t, 1, v)
	}
	require.Equal(t, "a", m.LoadOrStore(&two, "a"))
	require.Equal(t, "b", m.LoadOrStore(&three, "b"))
	require.Equal(t, "a", m.LoadOrStore(&two, "c"))
	require.Equal(t, []any{1, "a", "b"}, m.Clear())
	_, ok = m.Load(&two)
	require.False(t, ok)
}

// Of many goroutines one makes the value, and a look costs no allocation.
func TestMapOfManyGoroutines(t *testing.T) {
	var m Map
	made := 0
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			v, err := m.LoadOrMake(&one, func() (any, error) { made++; return &made, nil })
			require.NoError(t, err)
			require.Same(t, &made, v)
		})
	}
	wg.Wait()
	require.Equal(t, 1, made)
	require.Zero(t, testing.AllocsPerRun(100, func() { m.Load(&one) }))
}
