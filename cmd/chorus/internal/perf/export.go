package perf

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// WriteJSON writes the report with the field names of nccl-tests' JSON. It does
// not contain the environment.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

var csvHead = []string{"operation", "ranks", "size", "count", "type", "redop", "root", "in_place", "time_us", "alg_bw", "bus_bw", "p50_us", "p99_us", "wrong", "strategy", "chosen"}

// WriteCSV writes a line for each side of each row.
func (r *Report) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	if r.Pairs != nil {
		return r.Pairs.writeCSV(out)
	}
	_ = out.Write(csvHead) // Error below returns the error
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			wrong := ""
			if m.Wrong != nil {
				wrong = strconv.FormatInt(*m.Wrong, 10)
			}
			_ = out.Write([]string{
				row.Operation, strconv.Itoa(r.Ranks), strconv.Itoa(row.Bytes), strconv.Itoa(row.Count), row.Type, row.Reduction,
				strconv.Itoa(row.Root), strconv.FormatBool(i == 1), plain(m.Time), plain(m.AlgBW), plain(m.BusBW), plain(m.P50), plain(m.P99), wrong, row.Strategy, strconv.FormatBool(row.Chosen),
			})
		}
	}
	out.Flush()
	return out.Error()
}

// writeCSV writes a line for each pair.
func (m *Pairs) writeCSV(out *csv.Writer) error {
	_ = out.Write([]string{"from", "to", "size", "bandwidth", "latency_us"})
	for a, row := range m.Bandwidth {
		for b, bw := range row {
			if a != b {
				_ = out.Write([]string{strconv.Itoa(a), strconv.Itoa(b), strconv.Itoa(m.Bytes), plain(bw), plain(m.Latency[a][b])})
			}
		}
	}
	out.Flush()
	return out.Error()
}

func plain(x float64) string { return strconv.FormatFloat(x, 'g', 6, 64) }

// WriteBench writes the format of go test -bench for benchstat.
func (r *Report) WriteBench(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "goos: linux\npkg: chorus/perf\ncpu: %s\n", r.Device)
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			fmt.Fprintf(&b, "Benchmark%s-%d\t%d\t%.1f ns/op\t%.3f algbw-GB/s\t%.3f busbw-GB/s\t%.1f p99-ns\n",
				row.name(i == 1), r.Ranks, r.Plan.Iterations, m.Time*1e3, m.AlgBW, m.BusBW, m.P99*1e3)
		}
	}
	if m := r.Pairs; m != nil {
		for from, row := range m.Bandwidth {
			for to, bw := range row {
				if from != to {
					fmt.Fprintf(&b, "BenchmarkPairs/from=%d/to=%d/bytes=%d\t1\t%.3f GB/s\t%.1f ping-ns\n", from, to, m.Bytes, bw, m.Latency[from][to]*1e3)
				}
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// name returns a unique benchmark name for a side of a row.
func (r *Row) name(inPlace bool) string {
	parts := []string{camel(r.Operation), "type=" + r.Type}
	if r.Reduction != Moves.String() {
		parts = append(parts, "redop="+r.Reduction)
	}
	if r.Root >= 0 {
		parts = append(parts, fmt.Sprint("root=", r.Root))
	}
	if r.Strategy != "" {
		parts = append(parts, "strategy="+r.Strategy)
	}
	if inPlace {
		parts = append(parts, "inplace")
	}
	return strings.Join(append(parts, fmt.Sprint("bytes=", r.Bytes)), "/")
}

// camel converts all_reduce to AllReduce.
func camel(name string) string {
	var b strings.Builder
	for _, part := range strings.Split(name, "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}
