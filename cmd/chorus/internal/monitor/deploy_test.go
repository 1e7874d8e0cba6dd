package monitor

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// deployed is the folder of the files for Prometheus and Grafana.
var deployed = filepath.Join("..", "..", "..", "..", "deploy")

// metricNames returns the names of all metrics, with those of the series of histograms, and their labels.
func metricNames(t *testing.T) map[string][]string {
	source, err := os.ReadFile("metrics.go")
	require.NoError(t, err)
	names := map[string][]string{}
	for _, d := range []desc{buildDesc, epochDesc, ranksDesc, heartbeatDesc, deviceDesc, operationsDesc, bytesDesc, groupOpsDesc, groupBytesDesc, inFlightDesc, ageDesc,
		issuedDesc, completedDesc, launchedDesc, launchAgeDesc, lagDesc, lagTimeDesc, comparedDesc, lastDesc, heldUpDesc, errorsDesc, durationsDesc, exitsDesc, restartsDesc, workerRestartsDesc,
		temperatureDesc, powerDesc, utilizationDesc, allocatedDesc, reservedDesc, inactiveDesc, peakDesc, allocsDesc, retriesDesc, oomsDesc} {
		names[d.name] = append(d.labels[:len(d.labels):len(d.labels)], "chorus_job")
	}
	require.Len(t, names, strings.Count(string(source), `desc{"chorus_`), "each metric of metrics.go is in the list")
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		names[durationsDesc.name+suffix] = append(names[durationsDesc.name], "le")
	}
	return names
}

var (
	metricName = regexp.MustCompile(`\bchorus_[a-z_]+`)
	grouping   = regexp.MustCompile(`by \(([a-z_, ]+)\)`)
	matchers   = regexp.MustCompile(`(chorus_[a-z_]+)\{([^}]*)\}`)
	legend     = regexp.MustCompile(`\{\{ *(?:\$labels\.)?([a-z_]+) *\}\}`)
)

// requireMetrics checks that an expression uses metrics and labels that exist, and returns its metrics.
func requireMetrics(t *testing.T, names map[string][]string, expr string) (used []string) {
	t.Helper()
	for _, name := range metricName.FindAllString(expr, -1) {
		if name != "chorus_job" {
			require.Contains(t, names, name, expr)
			used = append(used, name)
		}
	}
	require.NotEmpty(t, used, expr)
	for _, m := range matchers.FindAllStringSubmatch(expr, -1) {
		for _, pair := range strings.Split(m[2], ",") {
			label, _, _ := strings.Cut(pair, "=")
			require.Contains(t, names[m[1]], label, expr)
		}
	}
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		for _, label := range strings.Split(m[1], ", ") {
			for _, name := range used {
				require.Contains(t, names[name], label, expr)
			}
		}
	}
	return used
}

// The dashboard uses metrics and labels that exist, and its legends have labels that the expressions keep.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(deployed, "grafana", "chorus.json"))
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			GridPos struct{ H, W, X, Y int }
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &dashboard))
	names, used := metricNames(t), map[string]bool{}
	titles, ids := map[string]bool{}, map[int]bool{}
	for _, p := range dashboard.Panels {
		require.False(t, titles[p.Title] || ids[p.ID], p.Title)
		titles[p.Title], ids[p.ID] = true, true
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		require.Equal(t, p.Type == "row", len(p.Targets) == 0, p.Title)
		for _, x := range p.Targets {
			for _, name := range requireMetrics(t, names, x.Expr) {
				used[name] = true
			}
			require.Contains(t, x.Expr, `chorus_job="$job"`, "the panels show one job")
			by := grouping.FindStringSubmatch(x.Expr)
			for _, m := range legend.FindAllStringSubmatch(x.LegendFormat, -1) {
				require.NotNil(t, by, x.Expr)
				require.Contains(t, strings.Split(by[1], ", "), m[1], "the legend of %s", x.Expr)
			}
		}
	}
	require.Equal(t, "job", dashboard.Templating.List[1].Name)
	require.Greater(t, len(used), 20)
}

// The alert rules use metrics and labels that exist, and Prometheus's own tool tests the rules where it is installed.
func TestAlerts(t *testing.T) {
	dir := filepath.Join(deployed, "prometheus")
	text, err := os.ReadFile(filepath.Join(dir, "alerts.yaml"))
	require.NoError(t, err)
	names := metricNames(t)
	rules := strings.Split(string(text), "- alert: ")[1:]
	require.Len(t, rules, 8)
	tests, err := os.ReadFile(filepath.Join(dir, "alerts_test.yaml"))
	require.NoError(t, err)
	for _, r := range rules {
		alert, rest, _ := strings.Cut(r, "\n")
		_, expr, _ := strings.Cut(rest, "expr:")
		expr, _, _ = strings.Cut(expr, "labels:")
		requireMetrics(t, names, strings.ReplaceAll(expr, "\n", " "))
		require.Equal(t, 2, strings.Count(string(tests), alert), "%s is tested where it fires and where it does not", alert)
	}
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip(err)
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		c := exec.CommandContext(t.Context(), tool, args...)
		c.Dir = dir
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}
