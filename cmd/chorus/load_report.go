package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/gds"
)

// A loadReport is the output of chorus load.
type loadReport struct {
	Files         []string     `json:"files"`
	Tensors       int          `json:"tensors"`
	Bytes         int64        `json:"bytes"` // in the files
	Plan          string       `json:"plan"`
	DType         string       `json:"dtype,omitempty"`
	Ranks         int          `json:"ranks"`
	MaxRankBytes  int64        `json:"max_rank_bytes"` // on the device with the most bytes
	Seconds       []float64    `json:"seconds"`
	Median        float64      `json:"median_seconds"`
	GBPerSecond   float64      `json:"gb_per_second"`
	Engines       []loadEngine `json:"engines"` // of this process
	Verified      int          `json:"verified,omitempty"`
	VerifySeconds float64      `json:"verify_seconds,omitempty"`
	Note          string       `json:"note,omitempty"`
}

// A loadEngine holds the bytes that one I/O engine read, and the reasons why it
// did not read the rest.
type loadEngine struct {
	Engine string   `json:"engine"`
	Bytes  int64    `json:"bytes"`
	Not    []string `json:"not,omitempty"`
}

func (r *loadReport) finish(c *checkpoint.Checkpoint) {
	sorted := slices.Sorted(slices.Values(r.Seconds))
	r.Median = sorted[len(sorted)/2]
	r.GBPerSecond = float64(r.Bytes) / 1e9 / r.Median
	for _, e := range []gds.Engine{gds.CuFile, gds.Direct, gds.Cached} {
		x := loadEngine{Engine: e.String()}
		for _, st := range c.Status() {
			s := map[gds.Engine]gds.EngineStatus{gds.CuFile: st.CuFile, gds.Direct: st.Direct, gds.Cached: st.Cached}[e]
			x.Bytes += s.BytesRead
			if s.Reason != nil && !slices.Contains(x.Not, s.Reason.Error()) {
				x.Not = append(x.Not, s.Reason.Error())
			}
		}
		r.Engines = append(r.Engines, x)
	}
}

func (r *loadReport) write(out io.Writer, asJSON bool) error {
	if asJSON {
		return encode(out, r)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d tensors, %s, in %s: %.2f GB/s\n", r.Tensors, gigabytes(r.Bytes), seconds(r.Median), r.GBPerSecond)
	if len(r.Seconds) > 1 {
		fmt.Fprintf(&b, "%d loads: %s to %s, median above\n", len(r.Seconds), seconds(slices.Min(r.Seconds)), seconds(slices.Max(r.Seconds)))
	}
	for _, e := range r.Engines {
		if e.Bytes > 0 {
			fmt.Fprintf(&b, "engine %s read %s\n", e.Engine, gigabytes(e.Bytes))
		}
		for _, why := range e.Not {
			fmt.Fprintf(&b, "not engine %s: %s\n", e.Engine, why)
		}
	}
	fmt.Fprintf(&b, "plan %s: %d devices, at most %s on one device\n", r.Plan, r.Ranks, gigabytes(r.MaxRankBytes))
	if r.Verified > 0 {
		fmt.Fprintf(&b, "verified: the SHA-256 of %d tensors on this process's devices match the files (%s)\n", r.Verified, seconds(r.VerifySeconds))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// gigabytes formats a number of bytes with a decimal unit.
func gigabytes(n int64) string {
	x, units := float64(n), []string{"B", "kB", "MB", "GB", "TB"}
	for len(units) > 1 && x >= 1000 {
		x, units = x/1000, units[1:]
	}
	if units[0] == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.3g %s", x, units[0])
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(10 * time.Microsecond).String()
}

// A bar is a progress bar on a terminal.
type bar struct {
	to    *os.File // nil if the bar is hidden
	begun time.Time
	last  time.Time
}

func newBar(to *os.File, wanted bool) *bar {
	b := &bar{begun: time.Now()}
	if info, err := to.Stat(); wanted && err == nil && info.Mode()&os.ModeCharDevice != 0 {
		b.to = to
	}
	return b
}

const barWidth = 32

// show draws the bar at most ten times a second.
func (b *bar) show(done, total int64) {
	if b.to == nil || time.Since(b.last) < 100*time.Millisecond && done < total {
		return
	}
	b.last = time.Now()
	part := float64(done) / float64(max(total, 1))
	n := int(part * barWidth)
	fmt.Fprintf(b.to, "\r[%s%s] %3.0f %%  %s of %s  %.1f GB/s \x1b[K", strings.Repeat("#", n), strings.Repeat(" ", barWidth-n), 100*part,
		gigabytes(done), gigabytes(total), float64(done)/1e9/time.Since(b.begun).Seconds())
}

// end erases the bar.
func (b *bar) end() {
	if b.to != nil {
		fmt.Fprint(b.to, "\r\x1b[K")
	}
}
