package monitor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Print writes the state as a table, the ranks that are behind first. It writes at most lines
// lines; 0 means all of them.
func (j *Job) Print(out io.Writer, lines int) error {
	var b strings.Builder
	fmt.Fprintf(&b, "job %s  epoch %d  restarts %d  %s on %s  %s\n", j.Job, j.Epoch, j.Restarts,
		count(len(j.Ranks), "rank"), count(len(j.Hosts), "host"), j.Time.Format(time.TimeOnly))
	for _, f := range j.Findings {
		fmt.Fprintln(&b, f)
	}
	if len(j.Findings) == 0 {
		text := "no rank is behind"
		j.members(func(_ *Rank, m *Member) {
			if m.Behind > 0 {
				text = fmt.Sprintf("no rank is behind for %s or more", seconds(minLag))
			}
		})
		fmt.Fprintln(&b, text)
	}
	fmt.Fprintln(&b)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RANK\tHOST\tPID\tSTATE\tGROUP\tISSUED\tDONE\tBEHIND\tIN FLIGHT\tAGE\tRATE\tDEVICE\tMEMORY\tBUSY\tPOWER")
	for _, r := range j.byLag() {
		r.print(w, j.Interval > 0)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	text := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	if lines > 1 && len(text) > lines {
		text = append(text[:lines-1], fmt.Sprintf("and %d more lines; chorus status without --watch shows them", len(text)-lines+1))
	}
	for i := range text {
		text[i] = strings.TrimRight(text[i], " ")
	}
	_, err := fmt.Fprintln(out, strings.Join(text, "\n"))
	return err
}

// print writes one line for each group of the rank, and for each device.
func (r *Rank) print(w io.Writer, rates bool) {
	state := r.State
	if state == "running" && r.Missing != "" {
		state = "no report"
	}
	pid := "-"
	if r.PID > 0 {
		pid = fmt.Sprint(r.PID)
	}
	fmt.Fprintf(w, "%d\t%s\t%s\t%s", r.Rank, r.Host, pid, state)
	for i := range max(len(r.Groups), len(r.Devices), 1) {
		if i > 0 {
			fmt.Fprint(w, "\t\t\t")
		}
		if i < len(r.Groups) {
			r.Groups[i].print(w, rates)
		} else {
			fmt.Fprint(w, "\t-\t-\t-\t-\t-\t-\t-")
		}
		if i < len(r.Devices) {
			d := &r.Devices[i]
			fmt.Fprintf(w, "\t%s\t%s of %s\t%s\t%s", d.Name, size(float64(d.Allocated)), size(float64(d.Total)), optional(d.Utilization, 1, "%"), optional(d.PowerDraw, 1000, " W"))
		} else {
			fmt.Fprint(w, "\t-\t-\t-\t-")
		}
		fmt.Fprintln(w)
	}
}

func (m *Member) print(w io.Writer, rates bool) {
	behind, op, age, speed := "-", "-", "-", "-"
	if m.Behind > 0 {
		behind = fmt.Sprintf("%d for %s", m.Behind, seconds(m.Lag))
	}
	if m.Oldest != nil {
		op, age = m.Oldest.Kind, seconds(time.Duration(m.Oldest.AgeNanos))
	}
	if m.State != "" {
		op = m.State
	}
	if rates {
		speed = size(m.BytesPerSecond) + "/s"
	}
	fmt.Fprintf(w, "\t%s\t%d\t%d\t%s\t%s\t%s\t%s", m.label(), m.Issued, m.Completed, behind, op, age, speed)
}

// optional returns the value of a sensor, divided by a unit.
func optional(v *int, unit int, suffix string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v/unit) + suffix
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// size returns a number of bytes with three digits.
func size(bytes float64) string {
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if bytes < 1000 {
			return fmt.Sprintf("%.3g %s", bytes, unit)
		}
		bytes /= 1024
	}
	return fmt.Sprintf("%.3g TiB", bytes)
}
