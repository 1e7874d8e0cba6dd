package monitor

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/status"
)

// serve serves a job at a port of the loopback, and counts the questions to the job.
func serve(t *testing.T, ask func(context.Context) (*job.Status, error)) (url string) {
	t.Helper()
	ln, public, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	require.False(t, public)
	exits := &Exits{}
	exits.Add("ok")
	exits.Add("code")
	exits.Add("ok")
	exits.AddRestart()
	s := NewServer(&Source{ask: ask, host: "n2"}, Labels{Version: "v1", Exits: exits})
	s.Serve(ln, TrustedHosts("127.0.0.1:0"))
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return "http://" + ln.Addr().String()
}

func get(t *testing.T, url, host string) (code int, header http.Header, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Host = host
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(b)
}

// parse reads metrics by the parser of Prometheus.
func parse(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(text))
	require.NoError(t, err)
	return families
}

// value returns the value of the only metric with the labels.
func value(t *testing.T, families map[string]*dto.MetricFamily, name string, labels map[string]string) float64 {
	t.Helper()
	require.Contains(t, families, name)
	var found []float64
	for _, m := range families[name].GetMetric() {
		match := 0
		for _, l := range m.GetLabel() {
			if want, ok := labels[l.GetName()]; ok && want == l.GetValue() {
				match++
			}
		}
		if match == len(labels) {
			found = append(found, m.GetGauge().GetValue()+m.GetCounter().GetValue())
		}
	}
	require.Len(t, found, 1, "%s %v", name, labels)
	return found[0]
}

// TestCountersOfAFreshJob scrapes a job before its first collective. A counter that appears with its first event cannot be
// used with increase().
func TestCountersOfAFreshJob(t *testing.T) {
	s := exampleStatus(t)
	for i := range s.Members {
		var p status.Process
		require.NoError(t, json.Unmarshal(s.Members[i].Report, &p))
		p.Groups[0].Issued, p.Groups[0].Completed, p.Groups[0].Oldest, p.Groups[0].Totals = 0, 0, nil, nil
		s.Members[i] = member(t, i, p)
	}
	s.Restarts = 0
	reg := prometheus.NewRegistry()
	reg.MustRegister(newCollector(&Source{ask: func(context.Context) (*job.Status, error) { return s, nil }, host: "n2"}, Labels{Exits: &Exits{}}))
	gathered, err := reg.Gather()
	require.NoError(t, err)
	families := map[string]*dto.MetricFamily{}
	for _, f := range gathered {
		families[f.GetName()] = f
	}
	group := map[string]string{"rank": "2", "group": "data"}
	of := func(key, v string) map[string]string {
		labels := maps.Clone(group)
		labels[key] = v
		return labels
	}
	for _, kind := range []string{"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "send", "receive",
		"all_gather_v", "reduce_scatter_v", "all_to_all_v", "dispatch", "combine", "quantized_all_reduce", "all_reduce_and_norm"} {
		require.Zero(t, value(t, families, "chorus_group_operations_total", of("op", kind)))
		require.Zero(t, value(t, families, "chorus_group_bytes_total", of("op", kind)))
	}
	for _, reason := range []string{"timeout", "peer_lost", "mismatch", "async", "refused"} {
		require.Zero(t, value(t, families, "chorus_collective_errors_total", of("reason", reason)))
	}
	for _, reason := range []string{"ok", "code", "signal", "killed", "stopped"} {
		require.Zero(t, value(t, families, "chorus_worker_exits_total", map[string]string{"reason": reason}))
	}
	require.Zero(t, value(t, families, "chorus_restarts_total", nil))
	require.Zero(t, value(t, families, "chorus_worker_restarts_total", nil))
	for _, name := range []string{"chorus_memory_allocations_total", "chorus_memory_retries_total", "chorus_memory_out_of_memory_total"} {
		require.Zero(t, value(t, families, name, map[string]string{"rank": "2", "device": "virtual:0"}))
	}
}

// TestJoiningJob asks a job that waits for its hosts.
func TestJoiningJob(t *testing.T) {
	s := NewSource("mnist", 4)
	j, err := s.Job(t.Context())
	require.NoError(t, err)
	var b strings.Builder
	require.NoError(t, j.Print(&b, 0))
	require.Regexp(t, `^job mnist .*0 ranks on 0 hosts.*\nthe job waits since [0-9.]+ s for its hosts: it needs 4 to start\n`, b.String())
	s.ask = func(context.Context) (*job.Status, error) { return exampleStatus(t), nil }
	j, err = s.Job(t.Context())
	require.NoError(t, err)
	require.Len(t, j.Ranks, 4, "the hosts have joined")
}

func TestMetrics(t *testing.T) {
	s := exampleStatus(t)
	p := status.Process{}
	for range 2 { // groups without a name get different labels
		p.Groups = append(p.Groups, status.Group{ID: "b", Size: 2, Issued: 3, Completed: 3})
	}
	p.Errors = []status.Errors{{Group: "data", Reason: "timeout", Count: 4}}
	p.Durations = []status.Durations{{Op: "all_reduce", Size: "le_1KiB"}}
	for _, x := range []float64{0.5, 5, 15} {
		p.Durations[0].Add(x)
	}
	s.Members[3] = member(t, 3, p)
	p = status.Process{}
	require.NoError(t, json.Unmarshal(s.Members[2].Report, &p))
	p.Devices[0].Temperature, p.Devices[0].PowerDraw, p.Devices[0].Utilization = new(61), new(321_500), new(87)
	s.Members[2] = member(t, 2, p)
	s.Restarts = 2
	url := serve(t, func(context.Context) (*job.Status, error) { return s, nil })
	code, _, text := get(t, url+"/metrics", "")
	require.Equal(t, http.StatusOK, code, text)
	families := parse(t, text)
	require.Equal(t, 4.0, value(t, families, "chorus_ranks", map[string]string{"chorus_job": "mnist", "state": "running"}))
	require.Equal(t, 2.0, value(t, families, "chorus_epoch", nil))
	require.Equal(t, 1.0, value(t, families, "chorus_build_info", map[string]string{"version": "v1", "nccl": "2.28.3", "driver": "13.0", "backend": "virtual"}))
	require.Equal(t, 1.0, value(t, families, "chorus_device_info", map[string]string{"rank": "2", "uuid": "GPU-1", "product": "virtual device", "pci": "0000:01:00.0"}))
	of := map[string]string{"chorus_job": "mnist", "rank": "2", "host": "n2", "group": "data"}
	require.Equal(t, 1.0, value(t, families, "chorus_group_lag_operations", of))
	require.Equal(t, 5.0, value(t, families, "chorus_group_lag_seconds", of), "rank 1 has issued the next one 5 s ago")
	require.Equal(t, 7.0, value(t, families, "chorus_collective_issued_sequence", of))
	require.Equal(t, 0.0, value(t, families, "chorus_collective_in_flight", of))
	of["op"] = "all_reduce"
	require.Equal(t, 8.0, value(t, families, "chorus_group_operations_total", of))
	require.Equal(t, float64(8<<20), value(t, families, "chorus_group_bytes_total", of))
	of["size"], of["strategy"] = "le_1MiB", "nccl"
	require.Equal(t, 8.0, value(t, families, "chorus_collective_operations_total", of))
	require.Equal(t, float64(8<<20), value(t, families, "chorus_collective_bytes_total", of))
	require.Equal(t, dto.MetricType_COUNTER, families["chorus_collective_bytes_total"].GetType())
	checkPools(t, families)
	require.Equal(t, 3.0, value(t, families, "chorus_collective_issued_sequence", map[string]string{"rank": "3", "group": "ranks-2#2"}))
	require.Equal(t, 2.0, value(t, families, "chorus_worker_exits_total", map[string]string{"host": "n2", "reason": "ok"}))
	for _, reason := range []string{"signal", "killed", "stopped"} {
		require.Zero(t, value(t, families, "chorus_worker_exits_total", map[string]string{"host": "n2", "reason": reason}), "before the first one")
	}
	require.Equal(t, 2.0, value(t, families, "chorus_restarts_total", nil))
	require.Equal(t, 1.0, value(t, families, "chorus_worker_restarts_total", map[string]string{"host": "n2"}))
	gpu := map[string]string{"rank": "2", "device": "virtual:0", "uuid": "GPU-1", "product": "virtual device", "pci": "0000:01:00.0"}
	require.Equal(t, 61.0, value(t, families, "chorus_device_temperature_celsius", gpu))
	require.Equal(t, 321.5, value(t, families, "chorus_device_power_watts", gpu))
	require.Equal(t, 0.87, value(t, families, "chorus_device_utilization_ratio", gpu))
	require.Zero(t, value(t, families, "chorus_collective_errors_total", map[string]string{"rank": "2", "group": "data", "reason": "timeout"}), "before the first one")
	require.Equal(t, 4.0, value(t, families, "chorus_collective_errors_total", map[string]string{"rank": "3", "group": "data", "reason": "timeout"}))
	h := families["chorus_collective_duration_seconds"].GetMetric()[0].GetHistogram()
	require.EqualValues(t, 3, h.GetSampleCount())
	require.InDelta(t, 20.5, h.GetSampleSum(), 1e-9)
	require.EqualValues(t, 1, h.GetBucket()[8].GetCumulativeCount(), "up to 0.66 s")
	require.EqualValues(t, 2, h.GetBucket()[10].GetCumulativeCount(), "up to 10 s")
	require.NotContains(t, text, `rank="0"`, "another agent exports the ranks of its host")
}

// checkPools checks the memory of rank 2 by pool. The sum of the pools is the memory of the device.
func checkPools(t *testing.T, families map[string]*dto.MetricFamily) {
	t.Helper()
	for name, want := range map[string]map[string]float64{
		"chorus_memory_allocated_bytes":      {"small": 1 << 20, "large": 2 << 20, "other": 1<<30 - 3<<20},
		"chorus_memory_reserved_bytes":       {"small": 2 << 20, "large": 0, "other": 2<<30 - 2<<20},
		"chorus_memory_inactive_split_bytes": {"small": 512, "large": 0, "other": 0},
		"chorus_memory_peak_allocated_bytes": {"small": 2 << 20, "large": 3 << 20, "all": 1 << 30},
	} {
		require.Len(t, families[name].GetMetric(), len(want), "rank 2 has a device, and rank 3 of this test has none")
		for pool, bytes := range want {
			require.Equal(t, bytes, value(t, families, name, map[string]string{"rank": "2", "device": "virtual:0", "pool": pool}), "%s of %s", name, pool)
		}
	}
}

// TestVersionsBeforeTheRanksReport has ranks without a device, whose versions are not known yet.
func TestVersionsBeforeTheRanksReport(t *testing.T) {
	s := exampleStatus(t)
	s.Members = s.Members[:2] // of the other host
	_, _, text := get(t, serve(t, func(context.Context) (*job.Status, error) { return s, nil })+"/metrics", "")
	require.Equal(t, 1.0, value(t, parse(t, text), "chorus_build_info", map[string]string{"version": "v1", "nccl": "", "driver": "", "backend": ""}))
}

// TestMetricsUnderLoad scrapes from many clients at the same time. They share questions to the job.
func TestMetricsUnderLoad(t *testing.T) {
	var asked atomic.Int64
	s := exampleStatus(t)
	url := serve(t, func(context.Context) (*job.Status, error) { asked.Add(1); return s, nil })
	begin := time.Now()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				_, _, text := get(t, url+"/metrics", "")
				parse(t, text)
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, asked.Load(), 1+int64(time.Since(begin)/fresh))
}

func TestPage(t *testing.T) {
	s := exampleStatus(t)
	url := serve(t, func(context.Context) (*job.Status, error) { return s, nil })
	code, header, text := get(t, url+"/", "")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'")
	require.Contains(t, text, `fetch("status.json"`)
	require.NotRegexp(t, `(src|href)=|https?://|innerHTML`, text, "the page needs no other file, and inserts texts as texts")

	code, header, text = get(t, url+"/status.json", "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "application/json", header.Get("Content-Type"))
	require.Empty(t, header.Get("Access-Control-Allow-Origin"))
	var j Job
	require.NoError(t, json.Unmarshal([]byte(text), &j))
	require.Equal(t, "mnist", j.Job)
	require.Len(t, j.Ranks, 4)
	require.Len(t, j.Findings, 1)
}

// TestRequestsThatAreRefused sends requests of strangers.
func TestRequestsThatAreRefused(t *testing.T) {
	fail := func(context.Context) (*job.Status, error) { return nil, errors.New("the job has ended") }
	url := serve(t, fail)
	for _, host := range []string{"evil.example", "evil.example:9400", "127.0.0.1.evil.example", "", "localhost.evil.example"} {
		for _, path := range []string{"/", "/metrics", "/status.json"} {
			if host == "" {
				continue
			}
			code, _, _ := get(t, url+path, host)
			require.Equal(t, http.StatusForbidden, code, host)
		}
	}
	for _, host := range []string{"localhost", "127.0.0.1:9400", "[::1]:1", "10.0.0.7"} {
		code, _, _ := get(t, url+"/", host)
		require.Equal(t, http.StatusOK, code, host)
	}
	code, _, text := get(t, url+"/status.json", "")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, text, "the job has ended")
	code, _, _ = get(t, url+"/metrics", "")
	require.Equal(t, http.StatusInternalServerError, code)
	code, _, _ = get(t, url+"/secret", "")
	require.Equal(t, http.StatusNotFound, code)

	resp, err := http.Post(url+"/", "text/plain", strings.NewReader("x"))
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)

	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	require.NoError(t, err)
	defer c.Close()
	_, _ = fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n", strings.Repeat("x", 64<<10)) // the server may close first
	answer, _ := io.ReadAll(c)
	require.Contains(t, string(answer), "431")
}

// TestManyRequests holds more requests than the server answers at the same time.
func TestManyRequests(t *testing.T) {
	end, begun := make(chan struct{}), make(chan struct{}, 2*maxAnswers) // on a busy machine, the first answer is not fresh for the last readers
	s := exampleStatus(t)
	url := serve(t, func(context.Context) (*job.Status, error) { begun <- struct{}{}; <-end; return s, nil })
	codes := make(chan int, 2*maxAnswers)
	for range 2 * maxAnswers {
		go func() {
			resp, err := http.Get(url + "/status.json")
			if err != nil {
				codes <- 0
				return
			}
			resp.Body.Close()
			codes <- resp.StatusCode
		}()
	}
	<-begun
	for range maxAnswers {
		require.Equal(t, http.StatusTooManyRequests, <-codes)
	}
	close(end)
	for range maxAnswers {
		require.Equal(t, http.StatusOK, <-codes)
	}
}

func TestListen(t *testing.T) {
	for addr, want := range map[string]string{
		":9400":           "write 127.0.0.1:9400, or 0.0.0.0:9400 if other hosts may read them",
		"9400":            "want host:port",
		"127.0.0.1":       "want host:port",
		"127.0.0.1:":      "want host:port",
		"127.0.0.1:99999": "want a port from 1 to 65535",
		"127.0.0.1:x":     "want a port from 1 to 65535",
	} {
		_, _, err := Listen(t.Context(), addr)
		require.ErrorContains(t, err, want, addr)
		require.ErrorIs(t, err, ErrAddress, addr)
	}
	_, _, err := Listen(t.Context(), "192.0.2.1:1")
	require.ErrorContains(t, err, "metrics at 192.0.2.1:1: ")
	require.ErrorContains(t, err, "choose an address of this host with --metrics or CHORUS_METRICS")
	require.NotErrorIs(t, err, ErrAddress, "an interface may come up later")
	ln, public, err := Listen(t.Context(), "0.0.0.0:0")
	require.NoError(t, err)
	defer ln.Close()
	require.True(t, public)
	_, _, err = Listen(t.Context(), ln.Addr().String())
	require.ErrorContains(t, err, "another job or program has the port: choose another one with --metrics or CHORUS_METRICS, or port 0 for any free one")
	require.NotErrorIs(t, err, ErrAddress, "the port may be free later")
	require.True(t, TrustedHosts("metrics.example:9400")("METRICS.example:9400"))
	require.False(t, TrustedHosts("0.0.0.0:9400")("metrics.example:9400"))
	require.False(t, TrustedHosts("0.0.0.0:9400")(""))
}

// TestFind finds jobs through their sockets.
func TestFind(t *testing.T) {
	a, b := "monitor-test-"+t.Name()+"-a", "monitor-test-"+t.Name()+"-b"
	require.Eventually(t, func() bool { // jobs of other tests may not answer for a moment
		_, _, err := Find(t.Context(), Choice{Job: a})
		_, none := errors.AsType[*NotFoundError](err)
		return none && err.Error() == fmt.Sprintf("this user runs no job %q of chorus run on this host", a)
	}, time.Minute, 10*time.Millisecond)
	for _, name := range []string{a, b, b} { // two hosts of one job on one machine
		s := exampleStatus(t)
		s.Job = name
		ln, err := ListenLocal()
		require.NoError(t, err)
		server := NewServer(&Source{ask: func(context.Context) (*job.Status, error) { return s, nil }}, Labels{})
		server.Serve(ln, nil)
		t.Cleanup(func() { require.NoError(t, server.Close()) })
	}
	for _, name := range []string{a, b} {
		c, j, err := Find(t.Context(), Choice{Job: name})
		require.NoError(t, err)
		require.Equal(t, name, j.Job)
		j, err = c.Next(t.Context(), 0)
		require.NoError(t, err)
		require.Positive(t, j.Interval)
	}
	_, _, err := Find(t.Context(), Choice{})
	require.ErrorContains(t, err, "several jobs run on this host: choose one of them with --job")
}

// TestFindJobsOfOneName: two jobs with one name are not taken for two hosts of one job.
func TestFindJobsOfOneName(t *testing.T) {
	var names []safe.NamedListener
	for k := range 2 {
		s := exampleStatus(t)
		for i := range s.Members { // none has attached
			s.Members[i].PID, s.Members[i].Report = 0, nil
		}
		ln, err := ListenLocal()
		require.NoError(t, err)
		server := NewServer(&Source{own: func() []string { return []string{"all", "launcher"}[k : k+1] }, ask: func(context.Context) (*job.Status, error) { return s, nil }}, Labels{})
		server.Serve(ln, nil)
		t.Cleanup(func() { require.NoError(t, server.Close()) })
		names = append(names, safe.NamedListener{Name: ln.Addr().String()})
	}
	for _, which := range []Choice{{}, {Job: "mnist"}} {
		_, _, err := find(t.Context(), names, which)
		require.EqualError(t, err, fmt.Sprintf("several jobs with the name mnist run on this host: choose one of them by a process ID of its chorus run with --pid, such as %d or %[1]d", os.Getpid()))
	}
	c, j, err := find(t.Context(), names[1:], Choice{PID: os.Getpid()})
	require.NoError(t, err)
	require.Equal(t, []string{"launcher"}, j.Launchers)
	require.False(t, c.HasEnded())
	_, _, err = find(t.Context(), names, Choice{Job: "mnist", PID: 1})
	require.EqualError(t, err, "this user runs no job \"mnist\" of chorus run on this host whose launcher is process 1")
	require.False(t, j.isOther(&Job{Job: "mnist", Launchers: []string{"another", "launcher"}}), "two launchers of one job")
	joining := &Job{Job: "mnist"}
	require.False(t, j.isOther(joining) || joining.isOther(j), "a launcher of the same job may not have joined")
}

// TestFindWhileAJobEnds asks jobs that close the connection instead of an answer. One of them has ended then.
func TestFindWhileAJobEnds(t *testing.T) {
	for _, ends := range []bool{true, false} {
		ln, err := ListenLocal()
		require.NoError(t, err)
		defer ln.Close()
		go func() {
			for c, err := ln.Accept(); err == nil; c, err = ln.Accept() {
				if ends {
					ln.Close()
				}
				c.Close()
			}
		}()
		_, _, err = find(t.Context(), []safe.NamedListener{{Name: ln.Addr().String()}}, Choice{})
		_, none := errors.AsType[*NotFoundError](err)
		require.Equal(t, ends, none, "%v", err)
	}
}

// userVar turns the test binary into a process that asks the socket in the variable.
const userVar = "CHORUS_TEST_SOCKET"

func TestMain(m *testing.M) {
	if socket := os.Getenv(userVar); socket != "" {
		if n, err := strconv.Atoi(os.Getenv("CHORUS_TEST_DECOYS")); err == nil {
			os.Exit(listenMain(socket, n, os.Getenv("CHORUS_TEST_FULL") != ""))
		}
		_, err := newClient(socket).Job(context.Background())
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestOtherUsers asks as another user, who gets no answer.
func TestOtherUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	ln, err := ListenLocal()
	require.NoError(t, err)
	var asked atomic.Bool
	server := NewServer(&Source{ask: func(context.Context) (*job.Status, error) { asked.Store(true); return exampleStatus(t), nil }}, Labels{})
	server.Serve(ln, nil)
	defer server.Close()
	ask := func(uid uint32) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), userVar+"="+ln.Addr().String())
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	require.Contains(t, ask(1234), "status.json")
	require.False(t, asked.Load())
	require.Equal(t, "<nil>\n", ask(0))
}

// Any user can bind an abstract socket whose name has line ends. It is no socket of a job, and does not end the command.
func TestNamesOfSockets(t *testing.T) {
	name := prefix() + strings.Repeat("A", 26)
	var all []safe.NamedListener
	for _, n := range []string{name, prefix() + "AAAA0", name + "\n", prefix() + strings.Repeat("a", 26)} {
		for _, owner := range []safe.Owner{safe.UnknownOwner, safe.AnotherUser, safe.ThisUser} {
			all = append(all, safe.NamedListener{Name: n, Owner: owner})
		}
	}
	require.Equal(t, []safe.NamedListener{{Name: name, Owner: safe.ThisUser}, {Name: name}}, candidates(all))

	ln, err := ListenLocal()
	require.NoError(t, err)
	defer ln.Close()
	list, err := sockets()
	require.NoError(t, err)
	require.Contains(t, list, safe.NamedListener{Name: ln.Addr().String(), Owner: safe.ThisUser})
}

// listenMain listens at sockets, as a user who wants to be taken for jobs. If full is set, their queues of connections are full.
func listenMain(socket string, n int, full bool) int {
	queue := 100
	if full {
		queue = 0
	}
	for i := range n {
		at := &syscall.SockaddrUnix{Name: socket[:len(socket)-2] + string([]byte{byte('A' + i/26), byte('A' + i%26)})}
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		if err := errors.Join(err, syscall.Bind(fd, at), syscall.Listen(fd, queue)); err != nil {
			fmt.Println(err)
			return 1
		}
		if !full {
			continue
		}
		client, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		if err := errors.Join(err, syscall.Connect(client, at)); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	fmt.Println("listening")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return 0
}

// Sockets of another user at names of this user are no jobs, whether they accept connections or not, and however many they are.
func TestDecoys(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	mine, err := ListenLocal()
	require.NoError(t, err)
	defer mine.Close()
	s := exampleStatus(t)
	s.Job = "monitor-test-" + t.Name()
	server := NewServer(&Source{ask: func(context.Context) (*job.Status, error) { return s, nil }}, Labels{})
	server.Serve(mine, nil)
	defer server.Close()

	const n = 200
	for _, full := range []string{"", "full"} {
		socket := prefix() + strings.Repeat("D", 26)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), userVar+"="+socket, fmt.Sprint("CHORUS_TEST_DECOYS=", n), "CHORUS_TEST_FULL="+full)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}}
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		text := make([]byte, len("listening"))
		_, err = io.ReadFull(out, text)
		require.NoError(t, err)
		require.Equal(t, "listening", string(text))

		all, err := safe.NamedListeners(prefix() + "DDDDD")
		require.NoError(t, err)
		require.Len(t, all, n)
		for i := range all {
			require.Equal(t, safe.AnotherUser, all[i].Owner)
			require.Equal(t, 65534, all[i].UID)
			all[i].Owner = safe.UnknownOwner // as on a kernel that does not say it
		}
		require.Empty(t, candidates([]safe.NamedListener{{Name: all[0].Name, Owner: safe.AnotherUser}}))
		_, j, err := Find(t.Context(), Choice{Job: s.Job})
		require.NoError(t, err)
		require.Equal(t, s.Job, j.Job)
		_, j, err = find(t.Context(), append(all, safe.NamedListener{Name: mine.Addr().String()}), Choice{})
		require.NoError(t, err)
		require.Equal(t, s.Job, j.Job)
		_, _, err = find(t.Context(), all, Choice{})
		want := "this user runs no job of chorus run on this host"
		if full != "" {
			want += fmt.Sprintf("; %d sockets whose owners are unknown have names of such jobs and refuse connections", n)
		}
		require.EqualError(t, err, want)
		require.NoError(t, in.Close())
		require.NoError(t, cmd.Wait())
	}
}

// A socket of this user that accepts no connection is a job that does not answer.
func TestOwnSocketThatAcceptsNothing(t *testing.T) {
	at := &syscall.SockaddrUnix{Name: prefix() + rand.Text()}
	var fds [2]int
	for i := range fds {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		require.NoError(t, err)
		defer syscall.Close(fd)
		fds[i] = fd
	}
	require.NoError(t, errors.Join(syscall.Bind(fds[0], at), syscall.Listen(fds[0], 0), syscall.Connect(fds[1], at)))
	all, err := safe.NamedListeners(at.Name)
	require.NoError(t, err)
	require.Equal(t, []safe.NamedListener{{Name: at.Name, Owner: safe.ThisUser}}, all)
	_, _, err = find(t.Context(), all, Choice{})
	require.ErrorContains(t, err, "a job runs on this host and does not answer: ")
	require.ErrorIs(t, err, syscall.EAGAIN)
}

// Clients that read metrics do not keep the owner from reading the status, and take a limited number of descriptors.
func TestListenersHaveTheirOwnLimits(t *testing.T) {
	end, begun := make(chan struct{}), make(chan struct{}, 100)
	s := exampleStatus(t)
	var slow atomic.Bool
	server := NewServer(&Source{ask: func(context.Context) (*job.Status, error) {
		if slow.Load() {
			begun <- struct{}{}
			<-end
		}
		return s, nil
	}, host: "n2"}, Labels{})
	public, _, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	local, err := ListenLocal()
	require.NoError(t, err)
	server.Serve(public, nil)
	server.Serve(local, nil)
	defer server.Close()

	before := openFiles(t)
	var conns []net.Conn
	for range 4 * maxConns {
		c, err := net.Dial("tcp", public.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
		require.NoError(t, err)
		conns = append(conns, c)
	}
	for _, c := range conns[:3*maxConns] { // each was answered, or closed to make room
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		_, _ = c.Read(make([]byte, 1))
	}
	require.Less(t, openFiles(t), before+len(conns)+maxConns+20, "both ends are in this process")

	slow.Store(true)
	var wg sync.WaitGroup
	for range maxAnswers {
		wg.Go(func() {
			if resp, err := http.Get("http://" + public.Addr().String() + "/status.json"); err == nil {
				resp.Body.Close()
			}
		})
	}
	<-begun
	client := http.Client{Timeout: 200 * time.Millisecond} // it may come before the others
	require.Eventually(t, func() bool {
		resp, err := client.Get("http://" + public.Addr().String() + "/status.json")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusTooManyRequests
	}, time.Minute, time.Millisecond)
	answered := make(chan error, 1)
	go func() {
		_, err := newClient(local.Addr().String()).Job(t.Context())
		answered <- err
	}()
	time.AfterFunc(50*time.Millisecond, func() { close(end) }) // the question to the job is one for all
	require.NoError(t, <-answered)
	wg.Wait()
}

func openFiles(t *testing.T) int {
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(names)
}

// One worker's report cannot make the metrics of its host invalid.
func TestReportsWithEqualLabels(t *testing.T) {
	s := exampleStatus(t)
	for i := range s.Members {
		if s.Members[i].Report == nil {
			continue
		}
		var p status.Process
		require.NoError(t, json.Unmarshal(s.Members[i].Report, &p))
		if len(p.Groups) == 0 {
			continue
		}
		for _, name := range []string{"a", "a", "a#2"} {
			g := p.Groups[0]
			g.Name = name
			p.Groups = append(p.Groups, g)
		}
		p.Errors = append(p.Errors, status.Errors{Group: "a", Reason: "\x01", Count: 1}, status.Errors{Group: "a", Reason: `\x01`, Count: 2})
		b, err := json.Marshal(p)
		require.NoError(t, err)
		s.Members[i].Report = b
	}
	code, _, body := get(t, serve(t, func(context.Context) (*job.Status, error) { return s, nil })+"/metrics", "127.0.0.1")
	require.Equal(t, http.StatusOK, code, body)
	require.Contains(t, body, `group="a#2#2"`)
	require.Contains(t, body, `reason="\\x01"`)
	parse(t, body)
}

// TestSeriesAreBounded: a worker that reports new groups, operations, errors and versions each time does not make the number of
// series grow for ever, changes no series of another rank, and keeps those that it has had.
func TestSeriesAreBounded(t *testing.T) {
	s, changed, round := exampleStatus(t), -1, 0
	var original status.Process
	ask := func(context.Context) (*job.Status, error) {
		for i := range s.Members {
			if m := &s.Members[i]; m.Report != nil && m.Host == "n2" && (changed < 0 || changed == m.Rank) {
				if changed < 0 {
					changed = m.Rank
					if err := json.Unmarshal(m.Report, &original); err != nil {
						return nil, err
					}
				}
				p := original
				text := func(i int) string { return fmt.Sprintf("%02d-%02d-%s", round, i, strings.Repeat("x", 200)) }
				p.NCCL = text(0)
				for i := range 20 {
					g := p.Groups[0]
					g.Name = text(i)
					g.Totals = []status.Total{{Op: text(i), Strategy: text(i), Size: text(i), Count: 1}}
					p.Groups = append(p.Groups, g)
					p.Errors = append(p.Errors, status.Errors{Group: text(i), Reason: text(i), Count: 1})
					p.Durations = append(p.Durations, status.Durations{Op: text(i), Size: text(i), Buckets: [12]uint64{1}})
				}
				b, err := json.Marshal(p)
				if err == nil {
					_, err = status.Decode(b)
				}
				if err != nil {
					return nil, err
				}
				m.Report = b
			}
		}
		return s, nil
	}
	source := &Source{ask: ask, host: "n2"}
	reg := prometheus.NewRegistry()
	reg.MustRegister(newCollector(source, Labels{Version: "v1"}))
	ever, before := map[string]bool{}, map[string]bool{}
	for round = range 100 {
		source.last = nil
		families, err := reg.Gather()
		require.NoError(t, err)
		now := map[string]bool{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					require.LessOrEqual(t, len(l.GetValue()), 300, l.GetName())
				}
				now[fmt.Sprint(f.GetName(), m.GetLabel())] = true
			}
		}
		if round == 0 {
			before = now
		}
		maps.Copy(ever, now)
		if round == 99 { // what is not of this worker's invention is still there
			for series := range before {
				if !strings.Contains(series, "xxx") {
					require.Contains(t, now, series)
				}
			}
		}
	}
	require.Greater(t, len(ever), maxSeries)
	require.Less(t, len(ever), 2*maxSeries+len(before))
}
