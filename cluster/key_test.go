package cluster

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

func TestKeyOfASession(t *testing.T) {
	addr := freeAddr(t)
	var wg sync.WaitGroup
	keys := make([]string, 2)
	for rank := range keys {
		wg.Go(func() {
			s, err := Join(t.Context(), &JoinConfig{Job: t.Name(), Size: 2, Rank: &rank, Addr: addr, Serve: rank == 0, Secret: testSecret, Timing: quick})
			if err != nil {
				t.Error(err)
				return
			}
			k, err := s.Key("test")
			keys[rank] = string(k)
			if err != nil {
				t.Error(err)
			}
			_ = s.Shutdown(t.Context())
		})
	}
	wg.Wait()
	require.Len(t, keys[0], job.KeyBytes)
	require.Equal(t, keys[0], keys[1])

	alone, err := Join(t.Context(), nil)
	require.NoError(t, err)
	defer alone.Close()
	a, err := alone.Key("test")
	require.NoError(t, err)
	b, err := alone.Key("test")
	require.NoError(t, err)
	require.Equal(t, a, b)
}
