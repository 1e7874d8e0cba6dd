package env

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzValues reads values of variables. A wrong value is quoted in the error.
func FuzzValues(f *testing.F) {
	for _, s := range []string{"7", "-1", "9223372036854775808", "3s", "yes", "no\r\x1b[K", "1e9h"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.ContainsRune(s, 0) {
			return
		}
		v := &Var{Name: "CHORUS_FUZZ"}
		t.Setenv(v.Name, s)
		_, err := v.Int()
		requireQuoted(t, err)
		_, err = v.Uint64()
		requireQuoted(t, err)
		_, err = v.Duration()
		requireQuoted(t, err)
		_, err = v.OneOf("yes", "no")
		requireQuoted(t, err)
		require.Equal(t, s == "yes" || s == "no", err == nil)
	})
}

func requireQuoted(t *testing.T, err error) {
	if err != nil {
		require.False(t, strings.ContainsAny(err.Error(), "\r\n\x1b"), "%q", err)
	}
}
