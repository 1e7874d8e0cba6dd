package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// Each command with JSON output prints a JSON object with the error if it fails.
func TestJSONOfErrors(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.safetensors")
	failing := map[string][]string{
		"chorus load": {missing}, "chorus checkpoint diff": {missing, missing}, "chorus checkpoint ls": {missing}, "chorus checkpoint verify": {missing},
		"chorus analyze": {missing}, "chorus timeline summary": {missing}, "chorus mem replay": {missing},
		"chorus mem ledger": {"--job", "missing"}, "chorus status": {"--job", "missing"}, "chorus info": {"missing"}, "chorus doctor": {"missing"}, "chorus preflight": {"missing"},
	}
	seen := 0
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		if c.Flags().Lookup("json") == nil {
			return
		}
		seen++
		args, known := failing[c.CommandPath()]
		require.True(t, known, c.CommandPath())
		out, errs, code := chorusCommand(t, nil, append(append(strings.Fields(c.CommandPath())[1:], "--json"), args...)...)
		require.NotZero(t, code, args)
		var r struct{ Error string }
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%s: %q, %s", c.CommandPath(), out, errs)
		require.Contains(t, errs, strings.TrimSpace(r.Error), c.CommandPath())
		require.NotEmpty(t, r.Error, c.CommandPath())
	}
	visit(newRootCommand())
	require.Len(t, failing, seen)
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
