package doctor

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
