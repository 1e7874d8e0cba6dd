package main

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

// All steps work on virtual devices, and each has a line with its time.
func TestMeasure(t *testing.T) {
	t.Setenv(env.Backend.Name, "virtual")
	t.Setenv(env.VirtualDevices.Name, "2")
	r, w, err := os.Pipe()
	require.NoError(t, err)
	stdout := os.Stdout
	os.Stdout = w
	err = measure(context.Background())
	os.Stdout = stdout
	require.NoError(t, w.Close())
	require.NoError(t, err)
	out, err := io.ReadAll(r)
	require.NoError(t, err)
	var names []string
	for line := range strings.Lines(string(out)) {
		name, _, found := strings.Cut(line, "\t")
		require.True(t, found, line)
		names = append(names, name)
	}
	require.Equal(t, []string{"open devices", "open a group", "allocate", "first all-reduce", "second all-reduce", "first product", "second product",
		"first random number", "second random number", "first strided copy", "second strided copy", "all steps"}, names)
}
