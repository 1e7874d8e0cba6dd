package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/gds"
)

// A loadReport is what chorus load shows.
type loadReport struct {
	Files         []string     `json:"files"`
	Tensors       int          `json:"tensors"`
	Bytes         int64        `json:"bytes"` // in the files
	Plan          string       `json:"plan"`
	DType         string       `json:"dtype,omitempty"`
	Ranks         int          `json:"ranks"`
	MaxRankBytes  int64        `json:"max_rank_bytes"` // on the device that has the most
	Seconds       []float64    `json:"seconds"`
	Median        float64      `json:"median_seconds"`
	GBPerSecond   float64      `json:"gb_per_second"`
	Engines       []loadEngine `json:"engines"` // of this process
	Verified      int          `json:"verified,omitempty"`
	VerifySeconds float64      `json:"verify_seconds,omitempty"`
	Note          string       `json:"note,omitempty"`
}

// A loadEngine is what one way from the files has done, and why it was not used for
// all of them.
type loadEngine struct {
	Engine string   `json:"engine"`
	Bytes  int64    `json:"bytes"`
	Not    []string `json:"not,omitempty"`
}

func (r *loadReport) finish(c *gds.Checkpoint) {
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
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d tensors, %s, in %s: %.2f GB/s\n", r.Tensors, gigabytes(r.Bytes), seconds(r.Median), r.GBPerSecond)
	if len(r.Seconds) > 1 {
		fmt.Fprintf(&b, "%d times: %s to %s, the median above\n", len(r.Seconds), seconds(slices.Min(r.Seconds)), seconds(slices.Max(r.Seconds)))
	}
	for _, e := range r.Engines {
		if e.Bytes > 0 {
			fmt.Fprintf(&b, "engine %s read %s\n", e.Engine, gigabytes(e.Bytes))
		}
		for _, why := range e.Not {
			fmt.Fprintf(&b, "not engine %s: %s\n", e.Engine, why)
		}
	}
	fmt.Fprintf(&b, "plan %s: %d devices, of which none has more than %s\n", r.Plan, r.Ranks, gigabytes(r.MaxRankBytes))
	if r.Verified > 0 {
		fmt.Fprintf(&b, "verified: the SHA-256 of %d tensors on this process's devices are those of the files (%s)\n", r.Verified, seconds(r.VerifySeconds))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// gigabytes writes a number of bytes in the decimal unit that fits.
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

// A bar shows how far a load is, on a terminal.
type bar struct {
	to    *os.File // nil shows nothing
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

// show draws the bar, ten times a second at most.
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

// end takes the bar away.
func (b *bar) end() {
	if b.to != nil {
		fmt.Fprint(b.to, "\r\x1b[K")
	}
}
