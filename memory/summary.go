package memory

import (
	"fmt"
	"strings"
)

const (
	singleLine = "---------------------------------------------------------------------------"
	doubleLine = "==========================================================================="
)

// Summary returns the statistics as a table in torch's layout: 75 columns between bars,
// each line with a newline (torch.cuda.memory_summary). Only the title differs: it has
// Chorus's name and one more blank. device is the ordinal in the title. If abbreviated
// is true, the rows of the two pools are omitted.
func (s Stats) Summary(device int, abbreviated bool) string {
	t := &summary{abbreviated: abbreviated}
	t.line(doubleLine)
	t.line(fmt.Sprintf(" %16s Chorus CUDA memory summary, device ID %-18d ", "", device))
	t.line(singleLine)
	t.line(fmt.Sprintf("  %9s CUDA OOMs: %-12d | %6s cudaMalloc retries: %-8d  ", "", s.OOMs, "", s.AllocRetries))
	t.line(doubleLine)
	t.line("        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ")
	t.pools("Allocated memory", s.AllocatedBytes, formatBytes)
	t.pools("Active memory", s.ActiveBytes, formatBytes)
	t.pools("Requested memory", s.RequestedBytes, formatBytes)
	t.pools("GPU reserved memory", s.ReservedBytes, formatBytes)
	t.pools("Non-releasable memory", s.InactiveSplitBytes, formatBytes)
	t.pools("Allocations", s.Allocation, formatCount)
	t.pools("Active allocs", s.Active, formatCount)
	t.pools("GPU reserved segments", s.Segment, formatCount)
	t.pools("Non-releasable allocs", s.InactiveSplit, formatCount)
	t.stat("Oversize allocations", s.OversizeAllocations)
	t.stat("Oversize GPU segments", s.OversizeSegments)
	t.line(doubleLine)
	return t.text.String()
}

// A summary builds the table of Summary.
type summary struct {
	text        strings.Builder
	abbreviated bool
}

func (t *summary) line(text string) { t.text.WriteString("|" + text + "|\n") }

// pools writes the rows of one quantity. The values of both pools together select the
// unit of each column.
func (t *summary) pools(name string, p PoolStats, format func(n, unit int64) string) {
	t.line(singleLine)
	t.row(name, p.All, p.All, format)
	if t.abbreviated {
		return
	}
	t.row("      from large pool", p.Large, p.All, format)
	t.row("      from small pool", p.Small, p.All, format)
}

func (t *summary) stat(name string, s Stat) {
	t.line(singleLine)
	t.row(name, s, s, formatCount)
}

func (t *summary) row(name string, s, unit Stat, format func(n, unit int64) string) {
	t.line(fmt.Sprintf(" %-21s | %s | %s | %s | %s ", name, format(s.Current, unit.Current), format(s.Peak, unit.Peak),
		format(s.Allocated, unit.Allocated), format(s.Freed, unit.Freed)))
}

// formatBytes writes n with the prefix for unit. The next prefix begins at 768.
func formatBytes(n, unit int64) string {
	n, prefix := scale(n, unit, 1024, 768, "B  ", "KiB", "MiB", "GiB", "TiB", "PiB")
	return fmt.Sprintf("%6d %s", n, prefix)
}

func formatCount(n, unit int64) string {
	n, prefix := scale(n, unit, 1000, 750, " ", "K", "M")
	return fmt.Sprintf("%7d %s ", n, prefix)
}

// scale divides n by step, once for each prefix that unit exceeds by most, and returns
// n with its prefix. Torch keeps the fraction of unit, so unit itself is not divided.
func scale(n, unit, step, most int64, prefixes ...string) (int64, string) {
	i := 0
	for least := most * step; i < len(prefixes)-1 && unit >= least; least *= step {
		n /= step
		i++
	}
	return n, prefixes[i]
}
