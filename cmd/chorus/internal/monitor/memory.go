package monitor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/gochorus/chorus/internal/status"
)

// PrintMemory writes what uses the memory of each rank's devices, the largest use first.
func (j *Job) PrintMemory(out io.Writer) error {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RANK\tHOST\tDEVICE\tBYTES\tSHARE\tUSE")
	for i := range j.Ranks {
		r := &j.Ranks[i]
		if len(r.Devices) == 0 {
			why := "this rank has no device yet"
			if r.Missing != "" {
				why = r.Missing
			}
			fmt.Fprintf(w, "%d\t%s\t-\t-\t-\t%s\n", r.Rank, r.Host, why)
		}
		for k := range r.Devices {
			r.printMemory(w, &r.Devices[k])
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// printMemory writes one line for each use of a device, and one for the free memory.
func (r *Rank) printMemory(w io.Writer, d *status.Device) {
	line := func(bytes uint64, use string) {
		share := "-"
		if d.Total > 0 {
			share = fmt.Sprintf("%.1f%%", 100*float64(bytes)/float64(d.Total))
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", r.Rank, r.Host, d.Name, size(float64(bytes)), share, use)
	}
	if len(d.Uses) == 0 && d.Total > d.Free {
		line(d.Total-d.Free, "in use; the process did not tell for what")
	}
	for _, u := range d.Uses {
		line(u.Bytes, u.Owner)
	}
	line(d.Free, "free")
}
