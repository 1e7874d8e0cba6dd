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

	"github.com/gochorus/chorus/internal/job"
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

// tellTale is added to the page. It sends what the browser shows to the test, and which columns of the
// table of ranks are within the window.
const tellTale = `<script>setInterval(() => {
  const inside = [...document.querySelectorAll("#ranks tr:first-child th")].filter(h => h.offsetWidth && h.getBoundingClientRect().right <= innerWidth).map(h => h.textContent);
  fetch("/shown", {method: "POST", body: document.documentElement.outerHTML + "width " + innerWidth + " of " + document.documentElement.scrollWidth + " columns " + inside.join(",") + "."})
}, 300)</script>`

const key = "rank,host,state,behind"

// TestPageOnAPhone loads the page in a window of 360 pixels. The columns that say which rank is behind are in
// it, and the rank that is behind comes first.
func TestPageOnAPhone(t *testing.T) {
	dom := shownAt(t, exampleStatus(t), "/phone")
	require.Contains(t, dom, "width 360 of 360 columns "+key+".")
	_, ranks, _ := strings.Cut(dom, `<table id="ranks">`)
	require.Regexp(t, `^<tbody><tr>.*?</tr><tr><td class="n">2</td>`, ranks)
}

// TestPageInABrowser loads the page in a browser, and reads what it shows of a job with a
// hostile name.
func TestPageInABrowser(t *testing.T) {
	s := exampleStatus(t)
	s.Job = "<img src=x onerror=alert(1)>"
	dom := shownAt(t, s, "/")
	requireShown(t, dom)
	require.Contains(t, dom, "columns "+key+",group,issued,completed,in flight,age,bandwidth,arrives last,process.")
}

// phone is a page with a window of 360 pixels, because the windows of a browser are wider.
const phone = `<!doctype html><iframe src="/framed" width="360" height="780" style="border: 0"></iframe>`

// shownAt returns what a browser shows of a job at a path, after two readings with rates.
func shownAt(t *testing.T, s *job.Status, at string) string {
	path := browser(t)
	routes := NewServer(&Source{ask: func(context.Context) (*job.Status, error) { return s, nil }}, Labels{}).routes()
	shown := make(chan string, 1000)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/shown" {
			b, _ := io.ReadAll(r.Body) // a part does not match
			shown <- string(b)
			return
		}
		switch r.URL.Path {
		case "/phone":
			_, _ = io.WriteString(w, phone)
		case "/framed": // the server forbids frames
			_, _ = io.WriteString(w, string(page)+tellTale)
		default:
			routes.ServeHTTP(w, r)
		}
		if r.URL.Path == "/" {
			_, _ = io.WriteString(w, tellTale)
		}
	}))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--disable-dev-shm-usage",
		"--window-size=1300,900", "--hide-scrollbars", "--remote-debugging-port=0", "--user-data-dir="+t.TempDir(), server.URL+at)
	require.NoError(t, cmd.Start())
	defer func() { cancel(); _ = cmd.Wait() }() // it is killed
	for {
		select {
		case dom := <-shown:
			if strings.Contains(dom, `points="0,`) && strings.Contains(dom, " 1,") {
				return dom
			}
		case <-ctx.Done():
			require.FailNow(t, "the browser does not show the page")
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
