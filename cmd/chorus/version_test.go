package main

import (
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersion(t *testing.T) {
	var b strings.Builder
	require.NoError(t, printVersion(&b, &debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-11-26T00:00:00Z"}, {Key: "vcs.modified", Value: "true"},
		{Key: "CGO_ENABLED", Value: "0"}, {Key: "-trimpath", Value: "true"},
	}}))
	require.Equal(t, "chorus v1.2.3\ncommit     abc, with changes\ncommitted  2026-11-26T00:00:00Z\ngo         "+runtime.Version()+
		"\nplatform   "+runtime.GOOS+"/"+runtime.GOARCH+"\ncgo_enabled 0\ntrimpath   true\n", b.String())
	b.Reset()
	require.NoError(t, printVersion(&b, nil))
	require.Contains(t, b.String(), "chorus (devel)\ngo ")
	released, commit = "v9", "def"
	defer func() { released, commit = "", "" }()
	b.Reset()
	require.NoError(t, printVersion(&b, nil))
	require.Contains(t, b.String(), "chorus v9\ncommit     def\ngo ")
	out, errs, code := chorusCommand(t, nil, "version")
	require.Zero(t, code, errs)
	require.Contains(t, out, runtime.Version())
	_, errs, code = chorusCommand(t, nil, "version", "now")
	require.Equal(t, 64, code)
	require.Contains(t, errs, `unknown argument "now"`)
}
