package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

const loadLong = `Load safetensors checkpoints to GPUs and report the speed and the I/O engine used.

A file is a safetensors file, an index of several files (model.safetensors.index.json),
or a directory with either of them. All files of a command line form one checkpoint.

Started alone, the command loads to all GPUs of this machine, or to the first -g of
them. In a job of several processes, each process loads to one GPU:

  chorus run -- chorus load model.safetensors

The plan selects the data of each GPU:
  replicate  every tensor on every GPU
  shard:D    a slice of each tensor along dimension D, -1 being the last; a tensor with
             too few dimensions is replicated
  own        whole tensors, distributed so that each GPU has about as many bytes
Each byte of the files is read once.

--verify reads all tensors back from the GPUs and compares their SHA-256 with the files.
--digests first compares the files with recorded digests: a JSON object that maps a
tensor's name to its digest, or to an object with a "sha256" field.

1 GB is 10^9 bytes. The exit code is 0 if the load succeeded and all checks passed, 1 if
not, and 64 for a mistake in the flags.`

const loadExample = `  chorus load model.safetensors --verify
  chorus load checkpoint/ -g 8 --plan shard:0 --dtype bfloat16
  chorus load checkpoint/ --times 5 --engine direct --json`

// loadFlags are the flags of chorus load.
type loadFlags struct {
	gpus    int
	plan    string
	dtype   string
	engine  string
	threads int
	times   int
	verify  bool
	digests string
	asJSON  bool
	quiet   bool
}

func newLoadCommand() *cobra.Command {
	var f loadFlags
	c := &cobra.Command{
		Use:     "load [flags] file...",
		Short:   "Load safetensors checkpoints to GPUs",
		Long:    loadLong,
		Example: loadExample,
		RunE: func(c *cobra.Command, files []string) error {
			l, err := f.check(files)
			if err != nil {
				return usageError(c, err)
			}
			return interruptible(c, l.run)
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one if the job has several processes")
	fs.StringVar(&f.plan, "plan", "replicate", "distribution over the GPUs: replicate, shard:DIMENSION or own")
	fs.StringVar(&f.dtype, "dtype", "", "element type to convert floating-point tensors to, such as bfloat16")
	fs.StringVar(&f.engine, "engine", "auto", "I/O engine: auto, cached, direct or cufile")
	fs.IntVar(&f.threads, "threads", 0, "I/O threads for each GPU; 0: chosen by the number of cores")
	fs.IntVar(&f.times, "times", 1, "number of loads; the summary shows the median")
	fs.BoolVar(&f.verify, "verify", false, "comparison of the loaded tensors with the files by SHA-256")
	fs.StringVar(&f.digests, "digests", "", "JSON file with recorded digests to check the files against")
	fs.BoolVar(&f.asJSON, "json", false, "summary in JSON")
	fs.BoolVarP(&f.quiet, "quiet", "q", false, "no progress bar")
	return c
}

// A loading is a validated command line.
type loading struct {
	loadFlags
	files []string
	cfg   checkpoint.LoadConfig
	file  gds.FileConfig
	dim   int  // the dimension of shard:D
	own   bool // --plan own
}

var loadEngines = []gds.Engine{gds.Auto, gds.Cached, gds.Direct, gds.CuFile}

// floats are the types that --dtype converts from and to.
var floats = []memory.DType{memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

// check validates the flags. Its error is a mistake of the user.
func (f *loadFlags) check(files []string) (*loading, error) {
	l := &loading{loadFlags: *f, files: files, file: gds.FileConfig{Threads: f.threads}}
	i := slices.IndexFunc(loadEngines, func(e gds.Engine) bool { return e.String() == f.engine })
	dim, shards := strings.CutPrefix(f.plan, "shard:")
	var err error
	if shards {
		l.dim, err = strconv.Atoi(dim)
	}
	l.own = f.plan == "own"
	switch {
	case len(files) == 0:
		return nil, errors.New("no file given")
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more", f.gpus)
	case i < 0:
		return nil, fmt.Errorf("--engine %q: want auto, cached, direct or cufile", f.engine)
	case err != nil || !shards && !l.own && f.plan != "replicate":
		return nil, fmt.Errorf("--plan %q: want replicate, shard:DIMENSION or own", f.plan)
	case f.times < 1 || f.threads < 0:
		return nil, fmt.Errorf("--times %d, --threads %d: want 1 or more, and 0 or more", f.times, f.threads)
	case f.verify && f.dtype != "":
		return nil, errors.New("--verify compares bytes and --dtype changes them: leave one out")
	}
	l.file.Engine = loadEngines[i]
	return l, l.convert()
}

// convert translates --dtype for the loader.
func (l *loading) convert() error {
	if l.dtype == "" {
		return nil
	}
	i := slices.IndexFunc(floats, func(t memory.DType) bool { return t.String() == l.dtype })
	if i < 0 {
		return fmt.Errorf("--dtype %q: want one of %v", l.dtype, floats)
	}
	l.cfg.DType = func(t checkpoint.Info) memory.DType {
		if slices.Contains(floats, t.DType) {
			return floats[i]
		}
		return memory.Invalid
	}
	return nil
}

// planFor translates --plan for the loader.
func (l *loading) planFor(c *checkpoint.Checkpoint, ranks int) checkpoint.Plan {
	if l.own {
		return owners(c.Infos(), ranks)
	}
	if l.plan == "replicate" {
		return nil
	}
	return func(t checkpoint.Info) checkpoint.Placement {
		if n := len(t.Shape); l.dim >= n || l.dim < -n {
			return checkpoint.Replicate()
		}
		return checkpoint.Shard(l.dim)
	}
}

// owners assigns each tensor, the largest first, to the rank with the fewest bytes.
func owners(infos []checkpoint.Info, ranks int) checkpoint.Plan {
	slices.SortStableFunc(infos, func(a, b checkpoint.Info) int { return cmp.Compare(b.Bytes(), a.Bytes()) })
	has := make([]int64, ranks)
	owner := map[string]int{}
	for _, t := range infos {
		least := slices.Index(has, slices.Min(has))
		owner[t.Name] = least
		has[least] += t.Bytes()
	}
	return func(t checkpoint.Info) checkpoint.Placement { return checkpoint.Own(owner[t.Name]) }
}

// run joins the other ranks and loads, and prints the results on rank 0.
func (l *loading) run(ctx context.Context, out io.Writer) error {
	c, err := checkpoint.Open(l.files, &l.file)
	if err != nil {
		return err
	}
	defer c.Close()
	m, err := attach(ctx, l.gpus)
	if err != nil {
		return err
	}
	defer m.Close()
	m.printNote("load")
	if l.digests != "" && m.isFirst() {
		if err := checkDigests(ctx, c, l.digests); err != nil {
			return err
		}
	}
	to, err := m.loadTarget(ctx)
	if err != nil {
		return err
	}
	defer to.close()
	r, err := l.load(ctx, c, to, m.isFirst())
	if err != nil {
		return err
	}
	r.Note = m.note
	if m.isFirst() {
		if err := r.write(out, l.asJSON); err != nil {
			return err
		}
	}
	return errors.Join(to.leave(ctx), m.Shutdown(ctx))
}

// load loads l.times times and verifies the last result.
func (l *loading) load(ctx context.Context, c *checkpoint.Checkpoint, to *loadTarget, first bool) (*loadReport, error) {
	cfg := l.cfg
	cfg.Plan = l.planFor(c, to.ranks)
	r := &loadReport{Files: l.files, Tensors: len(c.Infos()), Bytes: c.Bytes(), Ranks: to.ranks, Plan: l.plan, DType: l.dtype}
	for n := range l.times {
		bar := newBar(os.Stderr, first && !l.quiet)
		cfg.Progress = bar.show
		begun := time.Now()
		all, err := to.load(ctx, c, &cfg)
		took := time.Since(begun)
		bar.end()
		if err != nil {
			return nil, err
		}
		r.Seconds = append(r.Seconds, took.Seconds())
		if n == l.times-1 && l.verify {
			err = l.checkAll(ctx, c, all, r)
		}
		for _, w := range all {
			r.MaxRankBytes = max(r.MaxRankBytes, int64(w.Bytes()))
			err = errors.Join(err, w.Close())
		}
		if err != nil {
			return nil, err
		}
	}
	r.finish(c)
	return r, nil
}

func (l *loading) checkAll(ctx context.Context, c *checkpoint.Checkpoint, all []*checkpoint.Weights, r *loadReport) error {
	begun := time.Now()
	for _, w := range all {
		if err := c.Verify(ctx, w); err != nil {
			return err
		}
		r.Verified += len(w.Names())
	}
	r.VerifySeconds = time.Since(begun).Seconds()
	return nil
}

// mostDigests limits the size of a digest file: a checkpoint of 100,000 tensors
// needs about 16 MiB.
const mostDigests = 64 << 20

// checkDigests compares the tensors in the files with the recorded digests.
func checkDigests(ctx context.Context, c *checkpoint.Checkpoint, path string) error {
	text, err := safe.Read(path, mostDigests)
	if err != nil {
		return fmt.Errorf("--digests: %w", err)
	}
	var recorded map[string]json.RawMessage
	if err := json.Unmarshal(text, &recorded); err != nil {
		return fmt.Errorf("--digests %s: %w", path, err)
	}
	for _, t := range c.Infos() {
		var want string
		var within struct{ SHA256 string }
		if raw, ok := recorded[t.Name]; !ok {
			return fmt.Errorf("--digests %s: no digest for tensor %q of %s", path, t.Name, t.File)
		} else if json.Unmarshal(raw, &want) != nil {
			if err := json.Unmarshal(raw, &within); err != nil {
				return fmt.Errorf("--digests %s: tensor %q: %w", path, t.Name, err)
			}
			want = within.SHA256
		}
		got, err := c.SHA256(ctx, t.Name)
		if err != nil {
			return err
		}
		if !strings.EqualFold(got, want) {
			return fmt.Errorf("--digests %s: tensor %q of %s has SHA-256 %s, want %s as recorded", path, t.Name, t.File, got, want)
		}
	}
	return nil
}

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

// A loadTarget is the destination of a load: a group, or a single device, so that
// one GPU does not need NCCL.
type loadTarget struct {
	group  *comm.Group
	stream *stream.Stream
	ranks  int
}

func (m *member) loadTarget(ctx context.Context) (*loadTarget, error) {
	if m.Size() == 1 && len(m.devs) == 1 {
		s, err := stream.New(m.devs[0], nil)
		return &loadTarget{stream: s, ranks: 1}, err
	}
	g, err := m.group(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &loadTarget{group: g, ranks: g.Size()}, nil
}

func (t *loadTarget) close() {
	if t.group != nil {
		t.group.Close() // load or leave has returned the error
		return
	}
	t.stream.Close()
}

func (t *loadTarget) leave(ctx context.Context) error {
	if t.group != nil {
		return t.group.Shutdown(ctx)
	}
	return nil
}

func (t *loadTarget) load(ctx context.Context, c *checkpoint.Checkpoint, cfg *checkpoint.LoadConfig) ([]*checkpoint.Weights, error) {
	if t.group != nil {
		return c.Load(ctx, t.group, cfg)
	}
	w, err := c.LoadOn(ctx, t.stream, cfg)
	return []*checkpoint.Weights{w}, err
}
