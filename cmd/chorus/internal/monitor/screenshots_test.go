package monitor

import (
	"context"
	"flag"
	"image/png"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

var screenshots = flag.String("screenshots", "", "folder in which TestScreenshots leaves its pictures of the page")

// TestScreenshots takes pictures of the page on light and dark backgrounds and with the width of a phone. The corners have the colors of the
// page, and -screenshots keeps the pictures for people.
func TestScreenshots(t *testing.T) {
	path, dir := browser(t), *screenshots
	if dir == "" {
		dir = t.TempDir()
	}
	s := exampleStatus(t)
	server := httptest.NewServer(NewServer(&Source{ask: func(context.Context) (*job.Status, error) { return s, nil }}, Labels{}).routes())
	defer server.Close()
	for name, c := range map[string]struct {
		scheme, size string
		bright       bool
	}{
		"light": {"1", "1300,1000", true},
		"dark":  {"0", "1300,1000", false},
		"phone": {"1", "500,1600", true}, // windows of the browser are not narrower; TestPageOnAPhone has the width of a phone
	} {
		file := filepath.Join(dir, name+".png")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		out, err := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
			"--blink-settings=preferredColorScheme="+c.scheme, "--window-size="+c.size, "--timeout=4000", "--user-data-dir="+t.TempDir(), "--screenshot="+file, server.URL+"/").CombinedOutput()
		cancel()
		if _, missing := os.Stat(file); missing != nil {
			require.NoError(t, err, "%s", out)
		}
		f, err := os.Open(file)
		require.NoError(t, err, "%s", out)
		picture, err := png.Decode(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		r, g, b, _ := picture.At(2, 2).RGBA()
		require.Equal(t, c.bright, r+g+b > 3*0x8000, "%s: the background is %x %x %x", name, r, g, b)
	}
}
