package gemm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// solution returns the text of an algorithm.
func (q *queue) solution(a *cublasapi.Algo) (string, error) {
	c := new(config)
	get := func(at cublasapi.ConfigAttribute, v any) error {
		p, bytes := pointer(v)
		_, r := q.site.lt.MatmulAlgoConfigGetAttribute(a, at, p, bytes)
		return failed("cublasLtMatmulAlgoConfigGetAttribute", r)
	}
	if err := get(cublasapi.ConfigID, &c.id); err != nil {
		return "", err
	}
	err := c.each(get)
	return c.String(), err
}

// pointer returns the address and the size of an attribute.
func pointer(v any) (unsafe.Pointer, uintptr) {
	switch v := v.(type) {
	case *int32:
		return unsafe.Pointer(v), 4
	case *uint32:
		return unsafe.Pointer(v), 4
	case *uint16:
		return unsafe.Pointer(v), 2
	}
	return nil, 0
}

// restore returns the choice of a file for the plan, if cuBLASLt accepts it.
func (q *queue) restore(p *plan) (x choice, ok bool) {
	c := &q.site.choices
	c.mu.RLock()
	empty := len(c.file) == 0
	c.mu.RUnlock()
	if empty {
		return x, false
	}
	c.mu.RLock()
	r, ok := c.file[p.Op()+","+p.Params()]
	c.mu.RUnlock()
	if !ok {
		return x, false
	}
	x.tuned = &r
	if r.Solution == "Default" {
		list, err := q.suggest(p, 1)
		if err != nil {
			return x, false
		}
		x.algo, x.need = list[0].Algo, list[0].WorkspaceSize
	} else if x.algo, x.need, ok = q.rebuild(p, r.Solution); !ok {
		return x, false
	}
	c.add(&p.Problem, x)
	return x, true
}

// rebuild parses the text of an algorithm.
func (q *queue) rebuild(p *plan, text string) (a cublasapi.Algo, need uintptr, ok bool) {
	c, err := parseSolution(text)
	if err != nil || !c.splitsAsAllowed(p.Schemes) {
		return a, 0, false
	}
	lt, algo, checked := q.site.lt, new(cublasapi.Algo), new(cublasapi.HeuristicResult)
	types := &cublasapi.Types{Compute: p.Compute, Scale: p.scaleType(), A: p.A.Type, B: p.B.Type, C: p.C.Type, D: p.D.Type}
	err = q.bound(func() error {
		return failed("cublasLtMatmulAlgoInit", lt.MatmulAlgoInit(q.site.handle, types, c.id, algo))
	})
	if err != nil {
		return a, 0, false
	}
	err = c.each(func(at cublasapi.ConfigAttribute, v any) error {
		ptr, bytes := pointer(v)
		return failed("cublasLtMatmulAlgoConfigSetAttribute", lt.MatmulAlgoConfigSetAttribute(algo, at, ptr, bytes))
	})
	if err != nil || !q.aligned(algo, p) {
		return a, 0, false
	}
	o := &cublasapi.Operation{Desc: p.desc, A: p.layouts[0], B: p.layouts[1], C: p.layouts[2], D: p.layouts[3]}
	err = q.bound(func() error {
		return failed("cublasLtMatmulAlgoCheck", lt.MatmulAlgoCheck(q.site.handle, o, algo, checked))
	})
	return *algo, checked.WorkspaceSize, err == nil && int64(checked.WorkspaceSize) <= p.workspace
}

// aligned reports whether the addresses of the problem have the alignments that the algorithm
// needs, which MatmulAlgoCheck does not know.
func (q *queue) aligned(a *cublasapi.Algo, p *plan) bool {
	for i, log := range p.align {
		need := new(uint32)
		_, r := q.site.lt.MatmulAlgoCapGetAttribute(a, cublasapi.CapMinAlignmentABytes+cublasapi.CapAttribute(i), unsafe.Pointer(need), 4)
		if r != cublasapi.Success || *need > 1<<log {
			return false
		}
	}
	return true
}

// Validators returns the lines that results of a device must have.
func Validators(dev *device.Device) ([]string, error) {
	x, err := siteOf(dev)
	if err != nil {
		return nil, err
	}
	lt, err := x.openLt(gpu.DeviceOf(dev))
	if err != nil {
		return nil, err
	}
	name, err := dev.Name()
	if err != nil {
		return nil, err
	}
	return []string{"Validator,FORMAT,1", "Validator,CUBLASLT_VERSION," + strconv.Itoa(int(lt.GetVersion())),
		"Validator,DEVICE_NAME," + strings.ReplaceAll(name, ",", " "), "Validator,SM_COUNT," + strconv.Itoa(int(x.sms)),
		"Validator,WORKSPACE_BYTES," + strconv.FormatInt(x.workspace, 10)}, nil
}

// Results returns the results of a device, sorted by their texts.
func Results(dev *device.Device) ([]Result, error) {
	x, err := siteOf(dev)
	if err != nil {
		return nil, err
	}
	c := &x.choices
	c.mu.RLock()
	defer c.mu.RUnlock()
	all := map[string]Result{}
	for k, r := range c.file {
		all[k] = r
	}
	for _, x := range c.list {
		if x.tuned != nil {
			all[x.tuned.Op+","+x.tuned.Params] = *x.tuned
		}
	}
	list := make([]Result, 0, len(all))
	for _, r := range all {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Result) int { return strings.Compare(a.Op+a.Params, b.Op+b.Params) })
	return list, nil
}

// WriteResults writes the results of a device: validators, and a line for each product.
func WriteResults(dev *device.Device, w io.Writer) error {
	lines, err := Validators(dev)
	if err != nil {
		return err
	}
	list, err := Results(dev)
	if err != nil {
		return err
	}
	for _, r := range list {
		lines = append(lines, fmt.Sprintf("%s,%s,%s,%.6f", r.Op, r.Params, r.Solution, r.Time.Seconds()*1e3))
	}
	_, err = io.WriteString(w, strings.Join(lines, "\n")+"\n")
	return err
}

// The limits of files of results.
const (
	maxLine  = 1024 // bytes; a line has less than 700
	maxLines = 1 << 16
)

// readLines reads a file of results or of recorded products.
func readLines(r io.Reader) (lines []string, err error) {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, maxLine), maxLine)
	for s.Scan() {
		if line := strings.TrimSpace(s.Text()); line != "" {
			lines = append(lines, line)
		}
		if len(lines) > maxLines {
			return nil, fmt.Errorf("the file has more than %d lines", maxLines)
		}
	}
	if errors.Is(s.Err(), bufio.ErrTooLong) {
		return nil, fmt.Errorf("line %d: it has %d bytes or more", len(lines)+1, maxLine)
	}
	return lines, s.Err()
}

// ReadResults reads a file of WriteResults. Products use its results from now
// on, except those for which the device already has a result. The whole file is
// refused if its validators differ from the device's, or if a line is invalid.
func ReadResults(dev *device.Device, r io.Reader) error {
	lines, err := readLines(r)
	if err != nil {
		return err
	}
	want, err := Validators(dev)
	if err != nil {
		return err
	}
	n := slices.IndexFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "Validator,") })
	if n < 0 {
		n = len(lines)
	}
	if have := slices.Sorted(slices.Values(lines[:n])); !slices.Equal(have, slices.Sorted(slices.Values(want))) {
		return fmt.Errorf("the results are for another library or device: they have %q, and %s has %q: tune again", have, dev, want)
	}
	x, err := siteOf(dev)
	if err != nil {
		return err
	}
	file := map[string]Result{}
	for i, line := range lines[n:] {
		r, err := parseResult(line, x.workspace)
		if err != nil {
			return fmt.Errorf("line %d: %w", n+i+1, err)
		}
		file[r.Op+","+r.Params] = r
	}
	x.choices.merge(file)
	return nil
}

func parseResult(line string, workspace int64) (r Result, err error) {
	parts := strings.Split(line, ",")
	if len(parts) < 3 || len(parts) > 4 {
		return r, fmt.Errorf("%q: want Op,Params,Solution and the time in milliseconds", line)
	}
	r = Result{Op: parts[0], Params: parts[1], Solution: parts[2]}
	p, err := parseProblem(r.Params, workspace)
	if err != nil {
		return r, err
	}
	if p.Op() != r.Op {
		return r, fmt.Errorf("%q is not the operation of %q", r.Op, r.Params)
	}
	if r.Solution != "Default" {
		if _, err := parseSolution(r.Solution); err != nil {
			return r, err
		}
	}
	if len(parts) == 4 {
		ms, err := strconv.ParseFloat(parts[3], 64)
		if err != nil || !(ms >= 0 && ms < 1e9) {
			return r, fmt.Errorf("%q is not a time in milliseconds", parts[3])
		}
		r.Time = time.Duration(ms * 1e6)
	}
	return r, nil
}

// merge adds the results of a file, and forgets choices of the heuristic, so
// that the results replace them.
func (c *choices) merge(file map[string]Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file == nil {
		c.file = map[string]Result{}
	}
	for k, r := range file {
		if _, ok := c.file[k]; !ok {
			c.file[k] = r
		}
	}
	for k, x := range c.list {
		if x.tuned == nil {
			delete(c.list, k)
		}
	}
	c.version.Add(1)
}

// record adds a problem to the recorded ones.
func (c *choices) record(p *Problem) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.untuned != nil && len(c.untuned) < maxChoices {
		c.untuned[*p] = struct{}{}
	}
}

// Record records the products that are not tuned, from now on. stop ends the recording and
// writes one line for each product: Op,Params.
func Record(dev *device.Device) (stop func(w io.Writer) error, err error) {
	x, err := siteOf(dev)
	if err != nil {
		return nil, err
	}
	c := &x.choices
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.untuned != nil {
		return nil, errors.New("products are already being recorded")
	}
	mine := map[Problem]struct{}{}
	c.untuned = mine
	c.version.Add(1) // every plan is made again, and recorded
	stopped := false
	return func(w io.Writer) error {
		c.mu.Lock()
		if stopped {
			c.mu.Unlock()
			return fmt.Errorf("tensor: record matmuls of %s: stop was called before: only its first call writes the products", dev)
		}
		stopped, c.untuned = true, nil
		c.mu.Unlock()
		var lines []string
		for p := range mine {
			lines = append(lines, p.Op()+","+p.Params()+"\n")
		}
		slices.Sort(lines)
		_, err := io.WriteString(w, strings.Join(lines, ""))
		return err
	}, nil
}

// TuneRecorded tunes the products of a file of Record, on random operands.
func TuneRecorded(ctx context.Context, s *stream.Stream, r io.Reader, o *TuneOptions) (results []Result, err error) {
	lines, err := readLines(r)
	if err != nil {
		return nil, err
	}
	x, err := siteOf(s.Device())
	if err != nil {
		return nil, err
	}
	var problems []*Problem
	for i, line := range lines {
		op, params, _ := strings.Cut(line, ",")
		p, err := parseProblem(params, x.workspace)
		if err == nil && p.Op() != op {
			err = fmt.Errorf("%q is not the operation of %q", op, params)
		}
		if err == nil {
			err = p.check()
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		problems = append(problems, p)
	}
	for i, p := range problems {
		r, err := tuneRandom(ctx, s, p, o)
		if err != nil {
			return results, fmt.Errorf("line %d: %w", i+1, err)
		}
		results = append(results, r)
	}
	return results, nil
}

// This file has the texts of problems and algorithms in files of tuning results.

// typeName returns torch's name of a type in TunableOp signatures, or "" if products do not have
// the type. The types of C have their names in C.
func typeName(t cublasapi.DType) string {
	row := dtype.ByCUDA(t)
	switch {
	case row == nil:
		return ""
	case row.Format == nil:
		return row.C
	}
	return row.Scalar
}

// Op returns the name of the operation in files of results, such as GemmTunableOp_BFloat16_TN.
func (p *Problem) Op() string {
	ops := [2]byte{'N', 'T'}
	kind := "GemmTunableOp"
	switch {
	case p.Float8:
		kind = "ScaledGemmTunableOp"
	case p.Epilogue != cublasapi.EpilogueDefault:
		kind = "GemmAndBiasTunableOp"
	case p.Batch > 1:
		kind = "GemmStridedBatchedTunableOp"
	}
	return fmt.Sprintf("%s_%s_%c%c", kind, typeName(p.A.Type), ops[p.TransA&1], ops[p.TransB&1])
}

// numbers lists the fields of a problem for its text, without the workspace,
// which is a validator of the file.
func (p *Problem) numbers() []*int64 {
	list := []*int64{&p.M, &p.N, &p.K, &p.Batch}
	for _, l := range []*Layout{&p.A, &p.B, &p.C, &p.D, &p.Aux, &p.Bias} {
		list = append(list, &l.LD, &l.Stride)
	}
	return list
}

// flags lists the conditions of a problem for its text.
func (p *Problem) flags() []*bool {
	return []*bool{&p.NoSplitK, &p.Separate, &p.DeviceScalars, &p.Float8, &p.RowScales, &p.FastAccum}
}

// Params returns the parameters of the problem in files of results, which
// ParseProblem parses.
func (p *Problem) Params() string {
	ops := [2]byte{'n', 't'}
	parts := []string{string([]byte{ops[p.TransA&1], ops[p.TransB&1]})}
	for _, v := range p.numbers() {
		parts = append(parts, strconv.FormatInt(*v, 10))
	}
	for _, l := range []Layout{p.A, p.B, p.C, p.D, p.Aux, p.Bias} {
		parts = append(parts, strconv.Itoa(int(l.Type)))
	}
	parts = append(parts, strconv.Itoa(int(p.Compute)), strconv.Itoa(int(p.Epilogue)), strconv.Itoa(int(p.Schemes)),
		strconv.Itoa(int(p.Carveout)), strconv.Itoa(int(p.Library)))
	for _, a := range p.align {
		parts = append(parts, strconv.Itoa(int(a)))
	}
	for _, f := range p.flags() {
		parts = append(parts, map[bool]string{false: "0", true: "1"}[*f])
	}
	return strings.Join(parts, "_")
}

// parseProblem reads the text of Params, for a workspace of the given size.
func parseProblem(text string, workspace int64) (*Problem, error) {
	p := &Problem{workspace: workspace}
	parts := strings.Split(text, "_")
	bad := fmt.Errorf("%q is not the text of a product", text)
	numbers, flags := p.numbers(), p.flags()
	const types, others = 6, 5
	if len(parts) != 1+len(numbers)+types+others+alignments+len(flags) || len(parts[0]) != 2 {
		return nil, bad
	}
	p.TransA, p.TransB = cublasapi.Op(strings.IndexByte("nt", parts[0][0])), cublasapi.Op(strings.IndexByte("nt", parts[0][1]))
	v := make([]int64, len(parts)-1)
	for i, s := range parts[1:] {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < -1 {
			return nil, bad
		}
		v[i] = n
	}
	next := func() (n int64) { n, v = v[0], v[1:]; return n }
	for _, at := range numbers {
		*at = next()
	}
	for _, l := range []*Layout{&p.A, &p.B, &p.C, &p.D, &p.Aux, &p.Bias} {
		l.Type = cublasapi.DType(next())
	}
	p.Compute, p.Epilogue, p.Schemes = cublasapi.ComputeType(next()), cublasapi.Epilogue(next()), cublasapi.ReductionScheme(next())
	p.Carveout, p.Library = int32(next()), Library(next())
	for i := range p.align {
		p.align[i] = uint8(next())
	}
	for _, f := range flags {
		*f = next() != 0
	}
	if p.Params() != text {
		return nil, bad
	}
	return p, nil
}

// A config lists the attributes of an algorithm as its text orders them.
type config struct {
	id                                         int32
	tile                                       uint32
	splitK                                     int32
	scheme, swizzling, customOption, stagesNum uint32
	inner, cluster                             uint16
}

// each calls fn with the address and size of every attribute but the number.
func (c *config) each(fn func(a cublasapi.ConfigAttribute, v any) error) error {
	for _, x := range []struct {
		a cublasapi.ConfigAttribute
		v any
	}{
		{cublasapi.ConfigTileID, &c.tile}, {cublasapi.ConfigSplitKNum, &c.splitK}, {cublasapi.ConfigReductionScheme, &c.scheme},
		{cublasapi.ConfigCTASwizzling, &c.swizzling}, {cublasapi.ConfigCustomOption, &c.customOption}, {cublasapi.ConfigStagesID, &c.stagesNum},
		{cublasapi.ConfigInnerShapeID, &c.inner}, {cublasapi.ConfigClusterShapeID, &c.cluster},
	} {
		if err := fn(x.a, x.v); err != nil {
			return err
		}
	}
	return nil
}

const solutionFormat = "Lt_%d_%d_%d_%d_%d_%d_%d_%d_%d"

// String returns the text of a solution, such as Lt_66_18_1_0_0_0_36_0_2.
func (c *config) String() string {
	return fmt.Sprintf(solutionFormat, c.id, c.tile, c.splitK, c.scheme, c.swizzling, c.customOption, c.stagesNum, c.inner, c.cluster)
}

// parseSolution reads the text of String.
func parseSolution(text string) (*config, error) {
	c := new(config)
	_, err := fmt.Sscanf(text, solutionFormat, &c.id, &c.tile, &c.splitK, &c.scheme, &c.swizzling, &c.customOption, &c.stagesNum, &c.inner, &c.cluster)
	if err != nil || c.String() != text {
		return nil, fmt.Errorf("%q is not the text of an algorithm", text)
	}
	return c, nil
}

// splitsAsAllowed reports whether the algorithm reduces the parts of a split k
// by an allowed scheme, which cuBLASLt checks only for its own suggestions.
func (c *config) splitsAsAllowed(allowed cublasapi.ReductionScheme) bool {
	if c.splitK == 0 || c.splitK == 1 {
		return true
	}
	return allowed != 0 && cublasapi.ReductionScheme(c.scheme)&^allowed == 0
}
