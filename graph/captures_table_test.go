package graph_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A parity has the result of each program on each backend.
type parity map[string]*cells

type cells struct{ virtual, cuda string }

// unknown is the result of a program that has not run on the backend yet.
const unknown = "?"

func (p parity) set(of program, backend, cell string) {
	key := of.String()
	if p[key] == nil {
		p[key] = &cells{unknown, unknown}
	}
	if backend == "virtual" {
		p[key].virtual = cell
	} else {
		p[key].cuda = cell
	}
}

// over returns the new results, and the old ones of programs without a new result.
func (p parity) over(new parity) parity {
	sum := parity{}
	for _, c := range calls() {
		for _, of := range c.programs() {
			key := of.String()
			x := cells{unknown, unknown}
			for _, from := range []parity{p, new} {
				y := from[key]
				if y == nil {
					continue
				}
				if y.virtual != unknown && y.virtual != x.virtual {
					x = cells{y.virtual, unknown} // until a GPU has run it too
				}
				if y.cuda != unknown {
					x.cuda = y.cuda
				}
			}
			sum[key] = &x
		}
	}
	return sum
}

// accepted has the programs with different results on virtual devices and on CUDA, and the
// reason. A program is a call, and may have a place and a mode.
var accepted = map[string]string{}

func reason(of program) (key, why string) {
	for _, key := range []string{of.String(), of.name + ", " + of.from.name, of.name} {
		if why := accepted[key]; why != "" {
			return key, why
		}
	}
	return "", ""
}

// compare checks that the results are the results of the table, and that they are the same on
// both backends unless the difference is accepted.
func (want parity) compare(t *testing.T, got parity) {
	used := map[string]bool{}
	for _, c := range calls() {
		for _, of := range c.programs() {
			key := of.String()
			w, g := want[key], got[key]
			if w == nil {
				t.Errorf("docs/CAPTURES.md has no row for %s: run the test with -update", of)
				continue
			}
			if g == nil {
				continue // -run has left it out
			}
			if g.virtual != unknown && g.virtual != w.virtual {
				t.Errorf("%s: on virtual devices: %s; docs/CAPTURES.md has %s", of, g.virtual, w.virtual)
			}
			if g.cuda != unknown && w.cuda != unknown && g.cuda != w.cuda {
				t.Errorf("%s: on CUDA: %s; docs/CAPTURES.md has %s", of, g.cuda, w.cuda)
			}
			cuda := w.cuda
			if g.cuda != unknown {
				cuda = g.cuda
			}
			listed, why := reason(of)
			if cuda != unknown && g.virtual != unknown && g.virtual != cuda {
				if used[listed] = true; why == "" {
					t.Errorf("%s: on virtual devices: %s; on CUDA: %s", of, g.virtual, cuda)
				}
			}
		}
	}
	for key := range accepted {
		if len(got) == len(want) && !used[key] {
			t.Errorf("%s is an accepted difference, but the results are the same", key)
		}
	}
}

const head = `# Captures

What happens if a function that package graph captures makes a call. The result depends on the place of the call and on
the mode of the capture. It is "ok", or the kind of the call's error. If the call ended the capture, the error of the capture
follows after "capture:". A call succeeds, on virtual devices and on CUDA, in the places and modes without a row.
` + "`TestCaptures`" + ` of package graph makes all calls and compares their results with this
table; ` + "`-update`" + ` writes the table.

- The captured function launches a kernel on the captured stream, makes the call, and
  launches another kernel. It ignores the error of the call.
- Other stream: a stream of the same device that is not captured.
- Other goroutine: another goroutine makes the call while the captured function waits.
- CaptureError is ` + "`*device.CaptureError`" + `: Chorus refused the call before the driver saw
  it, so the capture goes on. Names in capitals are CUDA's, without CUDA_ERROR_.
- A question mark means that the call has not run on a GPU yet.

| call | from | mode | virtual | cuda |
| --- | --- | --- | --- | --- |
`

const (
	succeed = "\n## Calls that succeed in all places and modes\n"
	differ  = "\n## Differences\n"
)

var ok = cells{"ok", "ok"}

// markdown returns the document. Modes with the same result share a row, and those that succeed have none.
func (p parity) markdown() string {
	var b, good strings.Builder
	b.WriteString(head)
	for _, c := range calls() {
		if !slices.ContainsFunc(c.programs(), func(of program) bool { return *p[of.String()] != ok }) {
			fmt.Fprintf(&good, "- %s\n", c.name)
			continue
		}
		for rest := c.programs(); len(rest) > 0; {
			of := rest[0]
			x := *p[of.String()]
			var names []string
			rest = slices.DeleteFunc(rest, func(o program) bool {
				same := o.from == of.from && *p[o.String()] == x
				if same {
					names = append(names, o.mode.String())
				}
				return same
			})
			if len(names) == len(modes) {
				names = []string{"all"}
			}
			if x == ok {
				continue
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", c.name, of.from.name, strings.Join(names, ", "), x.virtual, x.cuda)
		}
	}
	b.WriteString(succeed + good.String())
	if len(accepted) > 0 {
		b.WriteString(differ)
		var keys []string
		for key := range accepted {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		for _, key := range keys {
			fmt.Fprintf(&b, "- %s: %s\n", key, accepted[key])
		}
	}
	return b.String()
}

// readParity reads the table. The result is empty if the document does not exist.
func readParity(t *testing.T) parity {
	t.Helper()
	data, err := os.ReadFile(parityTable)
	if os.IsNotExist(err) {
		return parity{}
	}
	require.NoError(t, err)
	p, listed := parity{}, map[string]bool{}
	for _, line := range strings.Split(string(data), "\n") {
		if name, is := strings.CutPrefix(line, "- "); is {
			listed[name] = true
		}
		f := strings.Split(strings.Trim(line, "| "), " | ")
		if len(f) != 5 || f[0] == "call" || f[0] == "---" {
			continue
		}
		names := strings.Split(f[2], ", ")
		for _, m := range modes {
			if f[2] == "all" || slices.Contains(names, m.String()) {
				p[fmt.Sprintf("%s, %s, %s", f[0], f[1], m)] = &cells{f[3], f[4]}
			}
		}
		listed[f[0]] = true
	}
	for _, c := range calls() {
		for _, of := range c.programs() {
			if listed[c.name] && p[of.String()] == nil {
				p[of.String()] = &cells{ok.virtual, ok.cuda}
			}
		}
	}
	return p
}
