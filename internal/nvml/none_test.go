//go:build !cgo || nonvml

package nvml

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOpenWithoutCgo(t *testing.T) {
	_, err := Open()
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.EqualError(t, err, "nvml: needs a program built with cgo; there is one built without")
}
