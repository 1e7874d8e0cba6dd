package route

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A Tuning is a table of the fastest strategies of each collective, measured on one kind
// of devices. An empty Tuning is valid for all devices; NCCL then runs everything.
type Tuning struct {
	For     Site     `json:"for"`
	Choices []Choice `json:"choices"`
}

// A Site is the set of conditions that the times of a Tuning depend on.
type Site struct {
	GPU     string `json:"gpu"`
	Ranks   int    `json:"ranks"`
	Hosts   int    `json:"hosts"` // of the ranks
	Locals  int    `json:"ranks_of_process"`
	Backend string `json:"backend"`
	Driver  string `json:"driver"` // its CUDA version
	NCCL    string `json:"nccl"`
	Kernels string `json:"kernels"` // version of the Chorus kernels
}

// A Choice is the measurement of one operation and size. Package comm documents which operations use it.
type Choice struct {
	Operation string   `json:"operation"`       // such as "all-reduce"
	Type      string   `json:"type,omitempty"`  // of reductions, such as "float32"
	Reduction string   `json:"redop,omitempty"` // of reductions
	Bytes     int      `json:"bytes"`           // all of an all-reduce or a broadcast, one rank's part of the others
	Times     []Timing `json:"times"`           // the fastest first
}

// A Timing is the duration of an operation with a strategy.
type Timing struct {
	Strategy Name    `json:"strategy"`
	Micros   float64 `json:"us"` // per operation, on the slowest rank, in a graph of several operations
	// Eager is the duration without a graph, for copy engines only: without a graph the
	// devices wait longer for each other. It applies to operations that are not captured.
	// Other strategies do not need it, because only copy engines use one call, and one
	// graph, for all ranks.
	Eager float64 `json:"eager_us,omitempty"`
}

// eager returns the duration of an operation that is not captured.
func (t Timing) eager() float64 {
	if t.Eager > 0 {
		return t.Eager
	}
	return t.Micros
}

// An operation has the properties of a Choice except the size.
type operation struct {
	kind  collective.Kind
	dtype memory.DType         // 0 for operations without reduction
	op    collective.Reduction // likewise
}

// tunedKinds are the collectives that a Tuning can have choices for.
var tunedKinds = []collective.Kind{collective.AllReduce, collective.AllGather, collective.ReduceScatter, collective.Broadcast, collective.AllToAll}

var tunedOps = []collective.Reduction{collective.Sum, collective.Prod, collective.Max, collective.Min, collective.Avg}

// tunedTypes are all element types.
var tunedTypes = func() (list []memory.DType) {
	for t := memory.Invalid + 1; t.Size() > 0; t++ {
		list = append(list, t)
	}
	return list
}()

// operation returns the operation of a Choice.
func (c *Choice) operation() (o operation, err error) {
	for _, k := range tunedKinds {
		if k.Plain() == c.Operation {
			o.kind = k
		}
	}
	switch {
	case o.kind == 0:
		return o, fmt.Errorf("there is no operation %q", c.Operation)
	case !reduces(o.kind):
		return o, nil
	}
	i := slices.IndexFunc(tunedTypes, func(t memory.DType) bool { return t.String() == c.Type })
	j := slices.IndexFunc(tunedOps, func(o collective.Reduction) bool { return o.String() == c.Reduction })
	if i < 0 || j < 0 {
		return o, fmt.Errorf("%s of %q by %q: there is no such type or reduction", c.Operation, c.Type, c.Reduction)
	}
	o.dtype, o.op = tunedTypes[i], tunedOps[j]
	return o, nil
}

// check validates the size and the times.
func (c *Choice) check() error {
	switch {
	case c.Bytes < 1:
		return fmt.Errorf("%s of %d bytes", c.Operation, c.Bytes)
	case len(c.Times) == 0:
		return fmt.Errorf("%s of %d bytes has no times", c.Operation, c.Bytes)
	}
	for i, t := range c.Times {
		s, err := ParseStrategy(t.Strategy)
		switch {
		case err != nil:
			return err
		case t.Eager != 0 && s != CopyEngines || !(t.Eager >= 0) || math.IsInf(t.Eager, 0):
			return fmt.Errorf("%s of %d bytes has eager_us %v of %s: want a time, of %s only", c.Operation, c.Bytes, t.Eager, s, CopyEngines)
		case s == Tuned || !(t.Micros >= 0) || math.IsInf(t.Micros, 0) || i > 0 && t.Micros < c.Times[i-1].Micros:
			return fmt.Errorf("%s of %d bytes has %v of %s: want the fastest first", c.Operation, c.Bytes, t.Micros, s)
		}
	}
	return nil
}

// A parsed is a Choice and its operation.
type parsed struct {
	*Choice
	what operation
}

// parse returns the choices with their operations.
func parse(choices []Choice) (list []parsed, err error) {
	for i := range choices {
		o, err := choices[i].operation()
		if err != nil {
			return nil, err
		}
		list = append(list, parsed{&choices[i], o})
	}
	return list, nil
}

// check validates the choices and returns them with their operations.
func (t *Tuning) check() ([]parsed, error) {
	list, err := parse(t.Choices)
	for i := range list {
		if err := list[i].check(); err != nil {
			return nil, err
		}
	}
	return list, err
}

// IndexOf validates a Tuning, and returns the strategies for each operation.
func IndexOf(t *Tuning) (*Index, error) {
	list, err := t.check()
	if err != nil {
		return nil, err
	}
	x := &Index{}
	for _, kind := range tunedKinds {
		if !reduces(kind) {
			x[kind][0][0] = measurements(list, operation{kind: kind})
			continue
		}
		for _, dtype := range tunedTypes {
			for _, op := range tunedOps {
				x[kind][dtype][op] = measurements(list, operation{kind, dtype, op})
			}
		}
	}
	return x, nil
}

// measurements returns the choices for one operation.
func measurements(list []parsed, o operation) *Measurements {
	return &Measurements{Aligned: nearest(list, o, false), Odd: nearest(list, o, true)}
}

// nearest returns the choices that are most similar to an operation, by size.
func nearest(choices []parsed, o operation, odd bool) (list []Measured) {
	best := -1
	for i := range choices {
		c := &choices[i]
		n := c.similarity(o, odd)
		if n < 0 || n < best {
			continue
		}
		if n > best {
			best, list = n, nil
		}
		eager := slices.Clone(c.Times)
		slices.SortStableFunc(eager, func(a, b Timing) int { return cmp.Compare(a.eager(), b.eager()) })
		list = append(list, Measured{Bytes: c.Bytes, Captured: strategiesOf(c.Times), Eager: strategiesOf(eager)})
	}
	slices.SortStableFunc(list, func(a, b Measured) int { return cmp.Compare(a.Bytes, b.Bytes) })
	return slices.CompactFunc(list, func(a, b Measured) bool { return a.Bytes == b.Bytes }) // the first of equals
}

// strategiesOf returns the strategies of times that are valid.
func strategiesOf(times []Timing) (list []Strategy) {
	for _, t := range times {
		s, _ := ParseStrategy(t.Strategy)
		list = append(list, s)
	}
	return list
}

// similarity returns how similar a choice is to an operation; negative means not at all.
func (c *parsed) similarity(o operation, odd bool) int {
	if c.what.kind != o.kind {
		return -1
	}
	n := 0
	for i, alike := range []bool{isOdd(c.Bytes) == odd, c.what.op == o.op, c.what.dtype == o.dtype, c.what.summed() == o.summed()} {
		if alike {
			n |= 1 << i
		}
	}
	return n
}

// summed reports whether an operation is a sum of floats of at most 32 bits. NCCL has more
// kernels for these sums than for others.
func (o operation) summed() bool {
	switch o.dtype {
	case memory.Float16, memory.BFloat16, memory.Float32:
		return o.op == collective.Sum
	}
	return false
}

// Fits returns why a Tuning is not valid at a site, or nil.
func Fits(t *Tuning, at Site) error {
	if t.For == at || len(t.Choices) == 0 {
		return nil
	}
	var differ []string
	for _, x := range []struct {
		what      string
		then, now any
	}{
		{"GPU", t.For.GPU, at.GPU}, {"number of ranks", t.For.Ranks, at.Ranks}, {"number of hosts", t.For.Hosts, at.Hosts}, {"ranks of a process", t.For.Locals, at.Locals},
		{"backend", t.For.Backend, at.Backend}, {"driver", t.For.Driver, at.Driver}, {"NCCL", t.For.NCCL, at.NCCL}, {"Chorus kernels", t.For.Kernels, at.Kernels},
	} {
		if x.then != x.now {
			differ = append(differ, fmt.Sprintf("%s %v, here %v", x.what, x.then, x.now))
		}
	}
	return fmt.Errorf("it was measured with %s: measure again with chorus tune", strings.Join(differ, "; "))
}

// tuningForm is the version of the file format.
const tuningForm = 2

// A tuningFile has the Tunings of one or several machines, one for each Site.
type tuningFile struct {
	Form    int       `json:"form"`
	Tunings []*Tuning `json:"tunings"`
}

// TuningFile returns the path of the file that groups use: CHORUS_TUNING_FILE, or
// chorus/tuning.json in the user's cache directory.
func TuningFile() (string, error) {
	if path := env.TuningFile.Value(); path != "" {
		return path, nil
	}
	cache, err := env.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("comm: no place for the tuning: %w: set %s", err, env.TuningFile.Name)
	}
	return filepath.Join(cache, "chorus", "tuning.json"), nil
}

// ErrOutdated is in the error of a Tuning of a file that was measured under other conditions.
var ErrOutdated = errors.New("out of date")

// LoadTuning returns the Tuning for a site from a file, and nil if the file has none for
// the same GPUs and numbers of ranks and processes. It returns an error if the file is
// invalid, or if its Tuning was measured under other conditions, such as another version.
func LoadTuning(path string, at Site) (*Tuning, error) {
	f, err := readTunings(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(f.Tunings, func(t *Tuning) bool { return t.For.matches(at) })
	if i < 0 {
		return nil, nil
	}
	if err := Fits(f.Tunings[i], at); err != nil {
		return nil, fmt.Errorf("comm: the tuning in %s is %w: %w", path, ErrOutdated, err)
	}
	return f.Tunings[i], nil
}

// Save writes the Tuning to a file, which it replaces atomically, and keeps the
// Tunings for other sites in it. Several processes may call it at the same
// time: each waits for the lock on the file's directory until ctx ends, but at
// most ten seconds.
func (t *Tuning) Save(ctx context.Context, path string) error {
	if t == nil || path == "" {
		return fmt.Errorf("comm: write the tuning: no tuning or no path given: %w", nccl.ErrorInvalidArgument)
	}
	if _, err := t.check(); err != nil { // no group could read such a file
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	d, err := lockFolder(ctx, filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	defer d.Close()
	f, err := readTunings(path)
	if errors.Is(err, fs.ErrNotExist) {
		f = &tuningFile{Form: tuningForm}
	} else if err != nil {
		return err
	}
	f.Tunings = slices.DeleteFunc(f.Tunings, func(other *Tuning) bool { return other.For.matches(t.For) })
	f.Tunings = append(f.Tunings, t)
	data, err := json.MarshalIndent(f, "", " ")
	if err != nil {
		return err
	}
	if err := d.Replace(filepath.Base(path), 0o644, data, []byte("\n")); err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	return nil
}

// CanSave returns why Save would fail for any Tuning, or nil. It creates the
// directory of the file if there is none.
func CanSave(ctx context.Context, path string) error {
	if path == "" {
		return errors.New("comm: write the tuning: no path given")
	}
	d, err := lockFolder(ctx, filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	defer d.Close()
	if _, err := readTunings(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := d.Probe(); err != nil {
		return fmt.Errorf("comm: write the tuning: %w", err)
	}
	return nil
}

// lockTimeout is the maximum time to wait for the lock.
const lockTimeout = 10 * time.Second

// lockFolder creates a directory if necessary, and locks the file in it against other
// processes until it is closed.
func lockFolder(ctx context.Context, path string) (*safe.Folder, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, err
	}
	d, err := safe.OpenFolder(path)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockTimeout, fmt.Errorf("another process has locked it for %v: end that process, or use another folder", lockTimeout))
	defer cancel()
	if err := poll.Until(ctx, func() (bool, error) { return tryLock(d.File()) }); err != nil {
		return nil, errors.Join(&os.PathError{Op: "lock", Path: path, Err: err}, d.Close())
	}
	return d, nil
}

func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// Deterministically ends the Kernels of groups whose reductions are deterministic: their times are others.
const Deterministically = ", deterministic"

func (at Site) deterministic() bool { return strings.HasSuffix(at.Kernels, Deterministically) }

// matches reports whether two sites agree except for versions. If at does not have the number
// of hosts, it is from an old version and matches any number.
func (at Site) matches(place Site) bool {
	return at.deterministic() == place.deterministic() && at.GPU == place.GPU && at.Ranks == place.Ranks && (at.Hosts == place.Hosts || at.Hosts == 0) &&
		at.Locals == place.Locals && at.Backend == place.Backend
}

// readTunings reads and validates a file.
func readTunings(path string) (*tuningFile, error) {
	data, err := readTrusted(path)
	if err != nil {
		return nil, fmt.Errorf("comm: read the tuning: %w", err)
	}
	f, err := parseTunings(data)
	if err != nil {
		return nil, fmt.Errorf("comm: %s is not a tuning: %w: remove it and measure again with chorus tune, or name another file in %s", path, err, env.TuningFile.Name)
	}
	return f, nil
}

// parseTunings parses and validates the text of a file.
func parseTunings(data []byte) (*tuningFile, error) {
	f := &tuningFile{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(f)
	var first struct{ Form int } // another version may have other fields
	switch {
	case json.Unmarshal(data, &first) == nil && first.Form != tuningForm:
		err = fmt.Errorf("it is of form %d, and this Chorus knows form %d", first.Form, tuningForm)
	case err != nil:
	case len(bytes.TrimSpace(data[d.InputOffset():])) > 0:
		err = errors.New("there is more behind its end")
	default:
		err = f.check()
	}
	return f, err
}

// tuningBytes is a generous limit of the file size.
const tuningBytes = 16 << 20

// readTrusted reads a tuning file from a directory that other users cannot change. That
// matters because a tuning decides how the ranks exchange data.
func readTrusted(path string) ([]byte, error) {
	d, err := safe.OpenFolder(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	data, _, err := d.Read(filepath.Base(path), tuningBytes)
	return data, err
}

func (f *tuningFile) check() error {
	for i, t := range f.Tunings {
		if t == nil {
			return errors.New("it has a tuning that is null")
		}
		if slices.ContainsFunc(f.Tunings[:i], func(other *Tuning) bool { return other.For.matches(t.For) }) {
			return fmt.Errorf("it has two tunings for %d ranks of %s", t.For.Ranks, t.For.GPU)
		}
		if _, err := t.check(); err != nil {
			return err
		}
	}
	return nil
}

// An Index has the strategies for every operation, by measured times.
type Index [collective.NumKinds][dtype.Count][collective.NumReductions]*Measurements

// Measurements has the strategies for one operation, by size.
type Measurements struct {
	Aligned, Odd []Measured // for multiples of 16 bytes, and for other sizes
}

// A Measured has the strategies for one size.
type Measured struct {
	Bytes           int
	Captured, Eager []Strategy // the fastest first
}

// reduces reports whether the times of a collective depend on its type and reduction.
func reduces(k collective.Kind) bool {
	return k == collective.AllReduce || k == collective.ReduceScatter
}

// isOdd reports whether a number of bytes is not a multiple of 16.
func isOdd(bytes int) bool { return bytes%16 != 0 }

// find returns the strategies for x, the fastest first. It uses the entry whose size has the
// nearest logarithm.
func (t *Index) find(x *collective.Op) []Strategy {
	bytes := x.Bytes()
	if t == nil || bytes == 0 || x.DType >= dtype.Count {
		return nil
	}
	m := t[x.Kind][0][0]
	if reduces(x.Kind) {
		if x.Reduction < 0 || x.Reduction >= collective.NumReductions {
			return nil
		}
		m = t[x.Kind][x.DType][x.Reduction]
	}
	if m == nil {
		return nil
	}
	list := m.Aligned
	if isOdd(bytes) {
		list = m.Odd
	}
	if len(list) == 0 {
		return nil
	}
	i, most := 0, len(list)-1
	for i < most {
		if mid := (i + most + 1) / 2; nearer(list[mid].Bytes, list[mid-1].Bytes, bytes) {
			i = mid
		} else {
			most = mid - 1
		}
	}
	if x.Captured {
		return list[i].Captured
	}
	return list[i].Eager
}

// nearer reports whether n, on a logarithmic scale, is at least as near to the larger of two
// sizes as to the smaller one.
func nearer(larger, smaller, n int) bool {
	return float64(n)*float64(n) >= float64(larger)*float64(smaller)
}
