package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/stretchr/testify/require"
)

// manDir is where TestManPages writes the pages. The release program uses it: the command itself
// does not link the library that makes manual pages.
var manDir = flag.String("man", "", "directory for the manual pages")

// TestManPages writes a manual page for each command.
func TestManPages(t *testing.T) {
	dir := *manDir
	if dir == "" {
		dir = t.TempDir()
	}
	root := newRootCommand()
	root.DisableAutoGenTag = true
	day := time.Unix(0, 0).UTC() // the same pages for the same source
	require.NoError(t, doc.GenManTree(root, &doc.GenManHeader{Title: "CHORUS", Section: "1", Source: "Chorus", Manual: "Chorus", Date: &day}, dir))
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c != root {
			return
		}
		text, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"))
		require.NoError(t, err)
		require.Contains(t, string(text), ".SH NAME")
		require.Contains(t, string(text), strings.ReplaceAll(strings.Fields(c.Short)[0], "-", `\-`))
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(root)
}
