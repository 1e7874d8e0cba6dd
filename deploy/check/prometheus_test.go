package check

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A real Prometheus scrapes a job, evaluates the alert rules, and understands each expression of the dashboard. promtool finds no
// fault in the metrics.
func TestRealPrometheus(t *testing.T) {
	for _, name := range []string{"prometheus", "promtool"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
	b, port, web := newBench(t), freePort(t), freePort(t)
	metrics := "127.0.0.1:" + itoa(port)
	job := b.command(t.Context(), nil, "chorus", "run", "--nproc-per-node", "2", "--job", "scraped", "--grace", "5s", "--metrics", metrics, "--", filepath.Join(b.dir, "elastic"), "-pause", "20ms", "-epochs", "100000")
	var out bytes.Buffer
	job.Stdout, job.Stderr = &out, &out
	require.NoError(t, job.Start())
	defer func() {
		_ = job.Process.Signal(os.Interrupt) // it may have ended
		_ = job.Wait()
		if t.Failed() {
			t.Log(out.String())
		}
	}()
	var text []byte
	require.Eventually(t, func() bool {
		r, err := http.Get("http://" + metrics + "/metrics")
		if err != nil {
			return false
		}
		text = body(t, r.Body)
		return bytes.Contains(text, []byte(`chorus_group_operations_total{`))
	}, time.Minute, 100*time.Millisecond, "no metrics of collectives")
	check := exec.CommandContext(t.Context(), "promtool", "check", "metrics")
	check.Stdin = bytes.NewReader(text)
	problems, err := check.CombinedOutput()
	require.NoError(t, err, "%s", problems)
	require.Empty(t, string(problems))

	rules, err := filepath.Abs(filepath.Join("..", "prometheus", "alerts.yaml"))
	require.NoError(t, err)
	config := filepath.Join(b.dir, "prometheus.yaml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: chorus
    static_configs: [{targets: [%q]}]
`, rules, metrics), 0o600))
	address := "127.0.0.1:" + itoa(web)
	daemon(t, filepath.Join(b.dir, "prometheus.log"), "prometheus", "--config.file="+config, "--storage.tsdb.path="+filepath.Join(b.dir, "tsdb"), "--web.listen-address="+address, "--log.level=warn")
	value := func(expr string) (string, error) {
		r, err := http.Get("http://" + address + "/api/v1/query?query=" + url.QueryEscape(expr))
		if err != nil {
			return "", err
		}
		var answer struct {
			Status, Error string
			Data          struct {
				Result []struct{ Value [2]any }
			}
		}
		if err := json.Unmarshal(body(t, r.Body), &answer); err != nil {
			return "", err
		}
		if answer.Status != "success" {
			return "", fmt.Errorf("%s: %s", expr, answer.Error)
		}
		if len(answer.Data.Result) == 0 {
			return "none", nil
		}
		return fmt.Sprint(answer.Data.Result[0].Value[1]), nil
	}
	for expr, want := range map[string]string{
		`up{job="chorus"}`: "1",
		`chorus_ranks{chorus_job="scraped",state="running"}`:                                           "2",
		`sum(rate(chorus_group_operations_total{chorus_job="scraped",op="all_reduce"}[10s])) > bool 0`: "1",
		`count(ALERTS{alertstate="firing"}) or vector(0)`:                                              "0",
	} {
		var last string
		require.Eventually(t, func() bool {
			v, err := value(expr)
			last = fmt.Sprint(v, " ", err)
			return err == nil && v == want
		}, time.Minute, 200*time.Millisecond, "%s", expr)
		t.Log(expr, last)
	}
	dashboard, err := os.ReadFile(filepath.Join("..", "grafana", "chorus.json"))
	require.NoError(t, err)
	var panels struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	require.NoError(t, json.Unmarshal(dashboard, &panels))
	shown := 0
	for _, p := range panels.Panels {
		for _, x := range p.Targets {
			v, err := value(strings.ReplaceAll(x.Expr, "$job", "scraped"))
			require.NoError(t, err)
			if v != "none" {
				shown++
			}
		}
	}
	require.Greater(t, shown, 15, "most panels show something; virtual devices have no sensors")
}
