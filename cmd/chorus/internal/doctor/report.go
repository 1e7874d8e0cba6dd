package doctor

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// A Report has the results of one host, or of all hosts of a job.
type Report struct {
	Version string   `json:"version"` // of chorus
	Hosts   []string `json:"hosts"`
	Results []Result `json:"results"`
	Counts  Counts   `json:"counts"`
}

// colours are the escape sequences of the verdicts on a terminal.
var colours = map[Verdict]string{Pass: "\x1b[32m", Warn: "\x1b[33m", Fail: "\x1b[31m", Unknown: "\x1b[2m"}

// A finding is a line of the text: equal results of several GPUs or hosts.
type finding struct {
	ids     []string
	verdict Verdict
	found   string // of the first result
	text    string
	notes   []string
	results []Result
}

// Write writes a line for each finding, and the counts last.
func (r *Report) Write(w io.Writer, colour bool) error {
	list := r.findings()
	width := 0
	for _, f := range list {
		if len(f.ids) == 1 {
			width = max(width, len(f.ids[0]))
		}
	}
	var b strings.Builder
	for _, f := range list {
		name := fmt.Sprintf("%-7s", f.verdict)
		if colour {
			name = colours[f.verdict] + name + "\x1b[0m"
		}
		if len(f.ids) > 1 { // only unknown results are folded over checks
			f.text, f.notes = f.text+":", wrap(f.ids, 80)
			fmt.Fprintf(&b, "%s  %s\n", name, f.text)
		} else {
			fmt.Fprintf(&b, "%s  %-*s  %s\n", name, width, f.ids[0], r.places(f.results)+f.text)
		}
		for _, n := range f.notes {
			fmt.Fprintf(&b, "%*s%s\n", width+11, "", n)
		}
	}
	c := r.Counts
	fmt.Fprintf(&b, "\n%s: %d pass, %d warn, %d fail, %d unknown\n", plural(len(r.Hosts), "host"), c.Pass, c.Warn, c.Fail, c.Unknown)
	_, err := io.WriteString(w, b.String())
	return err
}

// wrap joins names to lines of a width.
func wrap(list []string, width int) (lines []string) {
	line := ""
	for i, s := range list {
		if i < len(list)-1 {
			s += ","
		}
		if line != "" && len(line)+1+len(s) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+s, " ")
	}
	return append(lines, line)
}

// Names lists the names of checks in lines of the help.
func Names(checks []*Check) string { return strings.Join(wrap(names(checks), 80), "\n  ") }

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// findings folds equal results. Results that pass are folded even if their evidence differs, and
// unknown results with the same reason are folded over all checks.
func (r *Report) findings() []*finding {
	var list []*finding
	byKey := map[string]*finding{}
	for _, x := range r.Results {
		key := strings.Join([]string{x.ID, string(x.Verdict), x.Found, x.Want, x.Cause, x.Cure}, "\x00")
		switch x.Verdict {
		case Pass:
			key = x.ID + "\x00" + string(Pass)
		case Unknown:
			key = string(Unknown) + "\x00" + x.Cause
		}
		f := byKey[key]
		if f == nil {
			f = newFinding(x)
			byKey[key] = f
			list = append(list, f)
		}
		if !slices.Contains(f.ids, x.ID) {
			f.ids = append(f.ids, x.ID)
		}
		if x.Verdict == Pass && x.Found != f.found && !strings.HasSuffix(f.text, ", …") {
			f.text += ", …"
		}
		f.results = append(f.results, x)
	}
	slices.SortStableFunc(list, func(a, b *finding) int { return cmp.Compare(weight[a.verdict], weight[b.verdict]) })
	return list
}

// weight orders the findings: those that need an action come last, next to the counts.
var weight = map[Verdict]int{Unknown: 0, Pass: 1, Warn: 2, Fail: 3}

func newFinding(x Result) *finding {
	f := &finding{verdict: x.Verdict, found: x.Found, text: x.Found}
	switch x.Verdict {
	case Unknown:
		f.text = x.Cause
	case Warn, Fail:
		f.text += "; want " + x.Want
		f.notes = append(f.notes, x.Cause, "cure: "+x.Cure)
	}
	return f
}

// places names the hosts and GPUs of results: "hosts a, b: GPUs 0-7: ". It leaves out the hosts of
// a report of one host, and the places of unknown results of several checks.
func (r *Report) places(results []Result) string {
	var hosts []string
	gpus := map[string][]int{}
	for _, x := range results {
		if !slices.Contains(hosts, x.Host) {
			hosts = append(hosts, x.Host)
		}
		if x.GPU != nil && !slices.Contains(gpus[x.Host], *x.GPU) {
			gpus[x.Host] = append(gpus[x.Host], *x.GPU)
		}
	}
	byGPUs := map[string][]string{}
	var order []string
	for _, h := range hosts {
		g := gpuText(gpus[h])
		if byGPUs[g] == nil {
			order = append(order, g)
		}
		byGPUs[g] = append(byGPUs[g], h)
	}
	var parts []string
	for _, g := range order {
		text := g
		if len(r.Hosts) > 1 && byGPUs[g][0] != "" {
			text = strings.TrimSuffix(hostText(byGPUs[g])+" "+g, " ")
		}
		if text != "" {
			parts = append(parts, text)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return strings.Join(parts, ", ") + ": "
}

func hostText(names []string) string {
	if len(names) == 1 {
		return "host " + names[0]
	}
	return "hosts " + strings.Join(names, ", ")
}

// gpuText writes the numbers of GPUs as ranges.
func gpuText(list []int) string {
	if len(list) == 0 {
		return ""
	}
	slices.Sort(list)
	var parts []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		text := fmt.Sprint(list[i])
		if j > i {
			text += fmt.Sprintf("-%d", list[j])
		}
		parts, i = append(parts, text), j+1
	}
	if len(list) == 1 {
		return "GPU " + parts[0]
	}
	return "GPUs " + strings.Join(parts, ",")
}
