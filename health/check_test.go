package health

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

func TestHealthyHost(t *testing.T) {
	w := healthy()
	w.nccl = func() (*library, error) { return &library{"/usr/lib/libnccl.so.2.32.6", "2.32.6"}, nil }
	fast := Speed{OK: true, Reason: "fast"}
	w.Measured = &Measured{[]Copy{{Product: "NVIDIA H200", ToGPU: 55, FromGPU: 55}}, fast, fast, fast, fast}
	for _, r := range Run(t.Context(), w.Host, Checks) {
		require.Equal(t, Pass, r.Verdict, "%+v", r)
		require.Equal(t, "node1", r.Host)
	}
}

// A host without a GPU has no failure, and one reason for all checks of GPUs.
func TestHostWithoutGPU(t *testing.T) {
	w := healthy()
	w.withoutGPU()
	read, err := (&Selection{}).Select(Checks)
	require.NoError(t, err)
	r := &Report{Hosts: []string{"node1"}, Results: Run(t.Context(), w.Host, read)}
	r.Counts = Count(r.Results)
	require.Zero(t, r.Counts.Fail+r.Counts.Warn)
	require.True(t, r.Counts.OK(true))
	unknown := 0
	for _, x := range r.Results {
		if x.Verdict == Unknown {
			require.Equal(t, "this host has no NVIDIA GPU", x.Cause)
			unknown++
		}
	}
	require.Greater(t, unknown, 15)
	var out strings.Builder
	require.NoError(t, r.Write(&out, false))
	require.Equal(t, 1, strings.Count(out.String(), "this host has no NVIDIA GPU:"))
}

func TestChecksAreComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Checks {
		require.False(t, seen[c.ID], "%s is registered twice", c.ID)
		for _, need := range c.Needs {
			require.True(t, seen[need], "%s needs %s, which is not before it", c.ID, need)
		}
		seen[c.ID] = true
		require.NotEmpty(t, c.Hazard)
		require.Equal(t, c.Scope == ScopeJob, c.compare != nil, c.ID)
		require.Equal(t, c.Run == nil, c.compare != nil, c.ID)
		require.NotEmpty(t, c.Source)
	}
}

// docs/DOCTOR.md has a row for each check, in registry order.
func TestDocument(t *testing.T) {
	if _, err := os.Stat("../go.mod"); err != nil {
		t.Skip("no checkout around the test")
	}
	text, err := os.ReadFile("../docs/DOCTOR.md")
	require.NoError(t, err)
	var want, got []string
	for _, c := range Checks {
		want = append(want, "| `"+c.ID+"` | "+string(c.Scope)+" | "+c.Hazard+" | "+c.Source+" |")
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	require.Equal(t, strings.Join(want, "\n"), strings.Join(got, "\n"))
}

func fixed(id string, v Verdict, needs ...string) *Check {
	return &Check{ID: id, Needs: needs, Run: one(func(*Host) Result { return Result{Verdict: v, Found: "\x1b[2J"} })}
}

// A check whose need failed does not run, and a need that does not run does not matter.
func TestNeeds(t *testing.T) {
	list := []*Check{fixed("a", Fail), fixed("b", Pass, "a"), fixed("c", Pass, "b"), fixed("d", Pass, "absent")}
	results := Run(t.Context(), &Host{}, list)
	require.Equal(t, []Verdict{Fail, Unknown, Pass, Pass}, verdicts(results))
	require.Equal(t, "depends on a, which failed", results[1].Cause)
	require.Equal(t, `\x1b[2J`, results[0].Found, "text from outside is quoted")
}

func verdicts(results []Result) (list []Verdict) {
	for _, r := range results {
		list = append(list, r.Verdict)
	}
	return list
}

// Checks that need each other end with the context, and checks of one name have results of their own.
func TestOddChecks(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		ok := func(context.Context, *Host) []Result { return []Result{pass("", "")} }
		forever := make(chan struct{})
		defer close(forever)
		hangs := func(context.Context, *Host) []Result { <-forever; return nil }
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		rs := Run(ctx, &Host{}, []*Check{{ID: "a", Needs: []string{"b"}, Run: hangs}, {ID: "b", Needs: []string{"a"}, Run: hangs},
			{ID: "c", Run: ok}, {ID: "c", Run: ok, Scope: ScopeGPU}})
		require.Len(t, rs, 4)
		require.Equal(t, Unknown, rs[0].Verdict)
		require.Equal(t, Unknown, rs[1].Verdict)
		require.Equal(t, []Scope{"", ScopeGPU}, []Scope{rs[2].Scope, rs[3].Scope})
	})
}

// A check that hangs is unknown, and the others have their results.
func TestHangingCheck(t *testing.T) {
	var results []Result
	testhost.Bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		forever := make(chan struct{})
		defer close(forever)
		hangs := &Check{ID: "hangs", Run: one(func(*Host) Result { <-forever; return pass("", "") })}
		results = Run(ctx, &Host{}, []*Check{hangs, fixed("b", Warn)})
	})
	require.Equal(t, []Verdict{Unknown, Warn}, verdicts(results))
	require.Contains(t, results[0].Cause, "no answer within")
	require.Equal(t, "the check hangs did not finish", CanMeasure(results))
	require.Equal(t, "the check c has failed: correct the failures first", CanMeasure([]Result{{ID: "b", Verdict: Warn}, {ID: "c", Verdict: Fail}}))
	require.Empty(t, CanMeasure([]Result{{Verdict: Pass}, {Verdict: Warn}, unknown("no GPU")}))
}

func TestSelect(t *testing.T) {
	list := []*Check{{ID: "a"}, {ID: "b"}, {ID: "slow", Measures: true}, {ID: "all", Scope: ScopeJob}}
	for _, x := range []struct {
		Selection
		want []string
	}{
		{Selection{}, []string{"a", "b"}},
		{Selection{Measure: true, Job: true}, []string{"a", "b", "slow", "all"}},
		{Selection{Only: []string{"b", "slow"}, Measure: true}, []string{"b", "slow"}},
		{Selection{Skip: []string{"a"}}, []string{"b"}},
		{Selection{Only: []string{"a", "b"}, Skip: []string{"b"}}, []string{"a"}},
	} {
		got, err := x.Select(list)
		require.NoError(t, err)
		require.Equal(t, x.want, names(got))
	}
	_, err := (&Selection{Skip: []string{"c"}}).Select(list)
	require.EqualError(t, err, `unknown check "c": the checks are a, b, slow, all`)
	_, err = (&Selection{Only: []string{"slow"}}).Select(list)
	require.EqualError(t, err, "the check slow needs --measure")
	_, err = (&Selection{Only: []string{"all"}}).Select(list)
	require.ErrorContains(t, err, "the check all compares the hosts of a job")
	for _, x := range []Selection{{Only: []string{"a"}, Skip: []string{"a"}}, {Skip: []string{"a", "b"}}} {
		_, err = x.Select(list)
		require.EqualError(t, err, "no check is left to run: skip fewer checks, or name others")
	}
}

func TestCounts(t *testing.T) {
	c := Count([]Result{{Verdict: Pass}, {Verdict: Warn}, {Verdict: Unknown}, {Verdict: Unknown}})
	require.Equal(t, Counts{1, 1, 0, 2}, c)
	require.True(t, c.OK(false))
	require.False(t, c.OK(true))
	require.False(t, Count([]Result{fail("", "", "", "")}).OK(false))
}

func TestJSON(t *testing.T) {
	seven := 7
	text, err := json.Marshal(Result{ID: "mig", Scope: ScopeGPU, Host: "a", GPU: &seven, Verdict: Warn, Found: "on", Want: "off", Cause: "c", Cure: "d", Source: "s", Took: 5})
	require.NoError(t, err)
	require.JSONEq(t, `{"id":"mig","scope":"gpu","host":"a","gpu":7,"verdict":"warn","found":"on","want":"off","cause":"c","cure":"d","source":"s","took":5}`, string(text))
}

// on returns a result of a GPU; a negative number means the host.
func on(host string, gpu int, id string, r Result) Result {
	r.ID, r.Host = id, host
	if gpu >= 0 {
		r.GPU = &gpu
	}
	return r
}

func TestWrite(t *testing.T) {
	capped := warn("500 W", "700 W", "slower", "nvidia-smi -pl 700")
	r := &Report{Hosts: []string{"a", "b", "c"}, Results: []Result{
		on("a", -1, "shm", pass("1 GiB", "")), on("b", -1, "shm", pass("2 GiB", "")), on("c", -1, "shm", pass("1 GiB", "")),
		on("a", 0, "power-limit", pass("700 W", "")), on("a", 1, "power-limit", capped), on("b", 0, "power-limit", capped), on("b", 1, "power-limit", capped), on("b", 3, "power-limit", capped),
		on("a", -1, "xid", unknown("no log")), on("b", -1, "gds", unknown("no log")), on("c", -1, "gdr", unknown("no modules")),
		on("", -1, "mtu", pass("MTU 1500", "")),
		on("c", -1, "stack", fail("x", "y", "it breaks", "mend it")),
	}}
	r.Counts = Count(r.Results)
	var out strings.Builder
	require.NoError(t, r.Write(&out, false))
	require.Equal(t, `unknown  no log:
                      xid, gds
unknown  gdr          host c: no modules
pass     shm          hosts a, b, c: 1 GiB, …
pass     power-limit  host a GPU 0: 700 W
pass     mtu          MTU 1500
warn     power-limit  host a GPU 1, host b GPUs 0-1,3: 500 W; want 700 W
                      slower
                      cure: nvidia-smi -pl 700
fail     stack        host c: x; want y
                      it breaks
                      cure: mend it

3 hosts: 5 pass, 4 warn, 1 fail, 3 unknown
`, out.String())
	out.Reset()
	require.NoError(t, r.Write(&out, true))
	require.Contains(t, out.String(), "\x1b[31mfail   \x1b[0m  stack")
}
