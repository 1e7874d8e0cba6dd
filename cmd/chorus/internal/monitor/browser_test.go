package monitor

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
)

// browser returns a browser that can run without a screen.
func browser(t *testing.T) string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "headless_shell"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("no chromium here")
	return ""
}

// tellTale is added to the page. It sends what the browser shows to the test.
const tellTale = `<script>setInterval(() => fetch("/shown", {method: "POST", body: document.documentElement.outerHTML}), 300)</script>`

// TestPageInABrowser loads the page in a browser, and reads what it shows of a job with a
// hostile name.
func TestPageInABrowser(t *testing.T) {
	path := browser(t)
	s := exampleStatus(t)
	s.Job = "<img src=x onerror=alert(1)>"
	routes := NewServer(&Source{ask: func(context.Context) (*cluster.Status, error) { return s, nil }}, Labels{}).routes()
	shown := make(chan string, 1000)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/shown" {
			b, _ := io.ReadAll(r.Body) // a part does not match
			shown <- string(b)
			return
		}
		routes.ServeHTTP(w, r)
		if r.URL.Path == "/" {
			_, _ = io.WriteString(w, tellTale)
		}
	}))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--disable-dev-shm-usage",
		"--remote-debugging-port=0", "--user-data-dir="+t.TempDir(), server.URL+"/")
	require.NoError(t, cmd.Start())
	defer func() { cancel(); _ = cmd.Wait() }() // it is killed
	for {
		select {
		case dom := <-shown:
			if strings.Contains(dom, `points="0,`) && strings.Contains(dom, " 1,") { // two readings with rates
				requireShown(t, dom)
				return
			}
		case <-ctx.Done():
			require.Fail(t, "the browser does not show the page")
		}
	}
}

func requireShown(t *testing.T, dom string) {
	require.Contains(t, dom, "Job &lt;img src=x onerror=alert(1)&gt;</h1>")
	require.Contains(t, dom, "rank 2 (host n2, process 102) is behind in group data since 7.0 s")
	require.Contains(t, dom, `<td class="bad">1 for 7.0 s</td>`)
	require.Contains(t, dom, "1.00 GiB")
	require.Equal(t, 4, strings.Count(dom, "<td>virtual:"))
}
