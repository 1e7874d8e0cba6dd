package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// released and commit are the version and the commit of a release. The release program sets them
// by -ldflags=-X, because the go command records neither in a checkout without tags.
var released, commit string

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version, the commit, and how the command was built",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo()
			return printVersion(c.OutOrStdout(), info)
		},
	}
}

// version returns the module's version from the build information.
func version() string {
	info, _ := debug.ReadBuildInfo()
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) string {
	if released != "" {
		return released
	}
	if info == nil || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}

// printVersion prints one line for each fact. Settings that are not known are omitted: go install
// of a released version records no commit.
func printVersion(w io.Writer, info *debug.BuildInfo) error {
	lines := []string{"chorus " + versionOf(info)}
	settings := map[string]string{}
	if info != nil {
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
	}
	switch hash := settings["vcs.revision"]; {
	case hash != "":
		if settings["vcs.modified"] == "true" {
			hash += ", with changes"
		}
		lines = append(lines, "commit     "+hash, "committed  "+settings["vcs.time"])
	case commit != "":
		lines = append(lines, "commit     "+commit)
	}
	lines = append(lines, "go         "+runtime.Version(), "platform   "+runtime.GOOS+"/"+runtime.GOARCH)
	for _, key := range []string{"CGO_ENABLED", "-tags", "-ldflags", "-trimpath", "-race"} {
		if v := settings[key]; v != "" {
			lines = append(lines, fmt.Sprintf("%-10s %s", strings.TrimPrefix(strings.ToLower(key), "-"), v))
		}
	}
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}
