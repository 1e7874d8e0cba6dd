package job

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The processes with the secret and the workers derive the same keys, one for each purpose.
func TestKeyOfAPurpose(t *testing.T) {
	ks, err := DeriveKeys(testSecret, "job")
	require.NoError(t, err)
	worker, err := ks.Control.forWorkers("run")
	require.NoError(t, err)
	key := func(c Credential, job, purpose string) string {
		k, err := c.Derive(job, "run", purpose)
		require.NoError(t, err)
		require.Len(t, k, KeyBytes)
		return string(k)
	}
	a := key(ks.Control, "job", "a")
	require.Equal(t, a, key(worker, "job", "a"))
	other, err := DeriveKeys(append(testSecret[:len(testSecret):len(testSecret)], 1), "job")
	require.NoError(t, err)
	for _, k := range []string{key(worker, "job", "b"), key(other.Control, "job", "a"), string(worker.Key), string(ks.Control.Key)} {
		require.NotEqual(t, a, k)
	}

	none, err := DeriveKeys(nil, "job")
	require.NoError(t, err)
	worker, err = none.Control.forWorkers("run")
	require.NoError(t, err)
	for _, c := range []Credential{none.Control, worker} {
		_, err := c.Derive("job", "run", "a")
		var bad *ConfigError
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, `key for a of job "job": the job has no secret`)
	}
}
