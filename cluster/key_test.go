package cluster

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// The processes with the secret and the workers derive the same keys, one for each purpose.
func TestKeyOfAPurpose(t *testing.T) {
	ks, err := deriveKeys(testSecret, "job")
	require.NoError(t, err)
	worker, err := ks.control.forWorkers("run")
	require.NoError(t, err)
	key := func(c credential, job, purpose string) string {
		k, err := c.derive(job, "run", purpose)
		require.NoError(t, err)
		require.Len(t, k, keyBytes)
		return string(k)
	}
	a := key(ks.control, "job", "a")
	require.Equal(t, a, key(worker, "job", "a"))
	other, err := deriveKeys(append(testSecret[:len(testSecret):len(testSecret)], 1), "job")
	require.NoError(t, err)
	for _, k := range []string{key(worker, "job", "b"), key(other.control, "job", "a"), string(worker.key), string(ks.control.key)} {
		require.NotEqual(t, a, k)
	}

	none, err := deriveKeys(nil, "job")
	require.NoError(t, err)
	worker, err = none.control.forWorkers("run")
	require.NoError(t, err)
	for _, c := range []credential{none.control, worker} {
		_, err := c.derive("job", "run", "a")
		var bad *ConfigError
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, `key for a of job "job": the job has no secret`)
	}
}

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
	require.Len(t, keys[0], keyBytes)
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
