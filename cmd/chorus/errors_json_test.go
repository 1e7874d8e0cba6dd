package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A command with JSON output prints a JSON object with the error if it fails.
func TestJSONOfErrors(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.safetensors")
	for _, args := range [][]string{{"load", missing, "--json"}, {"checkpoint", "diff", missing, missing, "--json"}} {
		out, errs, code := chorusCommand(t, nil, args...)
		require.NotZero(t, code, args)
		var r struct{ Error string }
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%v: %q", args, out)
		require.Contains(t, r.Error, "missing.safetensors", args)
		require.Contains(t, errs, "missing.safetensors", args)
	}
}

// What was measured before an error is kept, in each format.
func TestPerfKeepsRowsBeforeAnError(t *testing.T) {
	dir := t.TempDir()
	faults := []string{"CHORUS_BACKEND=virtual", "CHORUS_VIRTUAL_FAULTS=ncclAllReduce#400=ncclSystemError"}
	for _, format := range []string{"json", "csv"} {
		file, page := filepath.Join(dir, "o."+format), filepath.Join(dir, format+".html")
		_, errs, code := chorusPerf(t, faults, "all_reduce", "-b", "8", "-e", "64K", "-f", "2", "-g", "2", "--format", format, "--output", file, "--html", page)
		require.NotZero(t, code, errs)
		require.Contains(t, errs, "ncclSystemError")
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if format == "json" {
			var r struct {
				Results []json.RawMessage
				Error   string
			}
			require.NoError(t, json.Unmarshal(text, &r), string(text))
			require.NotEmpty(t, r.Results)
			require.Contains(t, r.Error, "ncclSystemError")
		} else {
			require.Greater(t, strings.Count(string(text), "\n"), 1, string(text))
		}
		text, err = os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(text), "The measurement ended early: ")
		require.Contains(t, string(text), "</html>")
	}
}
