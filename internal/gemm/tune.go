package gemm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// TuneOptions are the limits of one tuning. All fields are set.
type TuneOptions struct {
	Duration   time.Duration // of the last measurement of an algorithm
	Iterations int           // in that measurement
	Candidates int
	Rotating   int64 // bytes of operands that are used in turns
	Check      bool  // drop algorithms whose results differ from the default's
	ATol, RTol float64
}

// A Result is the outcome of a tuning.
type Result struct {
	Op, Params    string
	Solution      string        // "Default" if the first suggestion is the fastest
	Time, Default time.Duration // of one product, with the solution and with the default
	Measured      int           // algorithms
	Dropped       int           // because they failed, or for other results
}

// An algorithm is dropped after the first or the second measurement if its time exceeds the
// best time by more than this factor (TunableOp).
const (
	firstLimit  = 1.5
	secondLimit = 1.15
)

const (
	finalists = 3    // algorithms that are measured in turns with the default
	turns     = 5    // measurements of each of them
	clearly   = 0.99 // of the default's time, for an algorithm that replaces the default
)

// Tune measures the algorithms for a product on copies of its operands, and makes the fastest
// one the device's choice. A product that was tuned before is not measured again. The host
// waits for the stream.
func Tune(ctx context.Context, s *stream.Stream, p *Product, o *TuneOptions) (Result, error) {
	if err := gpu.StreamOf(s).RefuseCapture("tensor: tune", "tune before the capture"); err != nil {
		return Result{}, err
	}
	if ctx.Err() != nil {
		return Result{}, context.Cause(ctx)
	}
	q, err := queueOf(s)
	if err != nil {
		return Result{}, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.now = *p
	q.now.workspace = q.site.workspace
	q.now.setAlignments()
	if err := q.prepare(); err != nil {
		return Result{}, err
	}
	if q.plan.blas {
		return Result{}, fmt.Errorf("%s: cuBLAS computes this product, which has no algorithms to choose from", &q.now.Problem)
	}
	if x, ok := q.site.choices.find(&q.now.Problem); ok && x.tuned != nil {
		return *x.tuned, nil
	}
	return q.tune(ctx, o)
}

// tune tunes the product of the call in progress, whose plan must be made again.
func (q *queue) tune(ctx context.Context, o *TuneOptions) (Result, error) {
	t := &tuning{queue: q, ctx: ctx, o: o, p: q.plan, product: q.now}
	r, err := t.run()
	t.p.chosen = stale
	q.now = t.product
	return r, err
}

// stale is not a valid version of choices.
const stale = ^uint64(0)

// online has the options for tuning products at their first use, or nil.
var online atomic.Pointer[TuneOptions]

// SetOnline enables tuning of products at their first use; nil disables it.
func SetOnline(o *TuneOptions) { online.Store(o) }

// onlineTimeout is the limit of one tuning at the first use.
const onlineTimeout = time.Minute

// tuneFirst tunes the call in progress, or keeps the default if that fails.
func (q *queue) tuneFirst(o *TuneOptions) error {
	ctx, cancel := context.WithTimeout(context.Background(), onlineTimeout)
	defer cancel()
	_, failed := q.tune(ctx, o)
	if q.dev.Err() != nil {
		return failed
	}
	if err := q.prepare(); err != nil {
		return err
	}
	q.plan.tuned = true
	return nil
}

// A tuning measures the algorithms of one plan.
type tuning struct {
	*queue
	ctx     context.Context
	o       *TuneOptions
	p       *plan
	product Product
	copies  []Pointers
	turn    int
	blocks  []uint64
	want    []float64 // the default's result
}

func (t *tuning) run() (r Result, err error) {
	list, err := t.suggest(t.p, t.o.Candidates)
	if err != nil {
		return r, err
	}
	if err := t.copyOperands(); err != nil {
		return r, errors.Join(err, t.free())
	}
	r = Result{Op: t.p.Op(), Params: t.p.Params(), Solution: "Default", Measured: len(list)}
	best := 0
	fast, err := t.screen(list, &r)
	if err == nil {
		best, err = t.playoff(list, fast, &r)
	}
	if err == nil && best > 0 {
		r.Solution, err = t.solution(&list[best].Algo)
	}
	if err != nil {
		return r, errors.Join(err, t.free())
	}
	kept := r
	t.site.choices.add(&t.p.Problem, choice{algo: list[best].Algo, need: list[best].WorkspaceSize, tuned: &kept})
	t.site.choices.version.Add(1)
	return r, t.free()
}

// screen measures every algorithm once, and returns the indexes of the fastest ones, the
// default's first.
func (t *tuning) screen(list []cublasapi.HeuristicResult, r *Result) (fast []int, err error) {
	times := make([]time.Duration, len(list))
	best := time.Duration(0)
	for i := range list {
		if t.ctx.Err() != nil {
			return nil, context.Cause(t.ctx)
		}
		took, err := t.measure(&list[i], best)
		switch {
		case err != nil && t.dev.Err() != nil || i == 0 && err != nil:
			return nil, err
		case err != nil:
			r.Dropped++
		case took > 0:
			times[i], fast = took, append(fast, i)
			if best == 0 || took < best {
				best = took
			}
		}
	}
	slices.SortStableFunc(fast[1:], func(a, b int) int { return cmp.Compare(times[a], times[b]) })
	return fast[:min(len(fast), 1+finalists)], nil
}

// playoff measures algorithms in turns, because the clock rate of a GPU falls while it is
// busy, and returns the index of the fastest one. The default is the first of fast, and
// stays unless another one is clearly faster.
func (t *tuning) playoff(list []cublasapi.HeuristicResult, fast []int, r *Result) (best int, err error) {
	times := make([][]time.Duration, len(fast))
	for range turns {
		for i, x := range fast {
			if t.ctx.Err() != nil {
				return 0, context.Cause(t.ctx)
			}
			took, err := t.measure(&list[x], 0)
			if err != nil {
				return 0, err
			}
			times[i] = append(times[i], took)
		}
	}
	return fast[fastest(times, r)], nil
}

// fastest returns the index of the fastest algorithm by its median time, and
// sets the times of r. The first algorithm is the default, which another must
// clearly beat.
func fastest(times [][]time.Duration, r *Result) (best int) {
	for i, all := range times {
		slices.Sort(all)
		took := all[len(all)/2]
		switch {
		case i == 0:
			r.Time, r.Default = took, took
		case took < r.Time && float64(took) < clearly*float64(r.Default):
			r.Time, best = took, i
		}
	}
	return best
}

// errDiffers drops an algorithm.
var errDiffers = errors.New("the result differs from the default's")

// measure returns the mean time of an algorithm, or 0 if it is clearly slower than best.
func (t *tuning) measure(x *cublasapi.HeuristicResult, best time.Duration) (took time.Duration, err error) {
	t.p.algo, t.p.need, t.plan = x.Algo, x.WorkspaceSize, t.p
	if _, err := t.takeRoom(); err != nil {
		return 0, err
	}
	t.turn = 0
	if _, err := t.time(1); err != nil { // a trial, which also loads the kernel
		return 0, err
	}
	if t.o.Check {
		if err := t.compare(); err != nil {
			return 0, err
		}
	}
	if _, err := t.time(2); err != nil {
		return 0, err
	}
	for _, step := range []struct {
		calls int
		limit float64
	}{{3, firstLimit}, {10, secondLimit}} {
		if took, err = t.time(step.calls); err != nil {
			return 0, err
		}
		if best > 0 && float64(took) > step.limit*float64(best) {
			return 0, nil
		}
	}
	return t.time(min(t.o.Iterations, max(1, int(t.o.Duration/max(took, 1)))))
}

// time returns the mean time of so many products, on operands in turns.
func (t *tuning) time(calls int) (time.Duration, error) {
	begin, err := t.s.Record(&stream.EventConfig{Timing: true})
	if err != nil {
		return 0, err
	}
	defer begin.Close()
	for range calls {
		t.now = t.product
		t.now.At = t.copies[t.turn%len(t.copies)]
		t.turn++
		if err := t.point(t.p); err != nil {
			return 0, err
		}
		if err := t.bound(t.launch); err != nil {
			return 0, err
		}
	}
	end, err := t.s.Record(&stream.EventConfig{Timing: true})
	if err != nil {
		return 0, err
	}
	defer end.Close()
	if err := end.Sync(t.ctx); err != nil {
		return 0, err
	}
	took, err := end.Elapsed(begin)
	return max(1, took/time.Duration(calls)), err
}

// spans returns the addresses of the operands that are copied, and their bytes.
func (t *tuning) spans(at *Pointers) (list []*cudadrv.DevicePtr, bytes []int64) {
	p := &t.product.Problem
	add := func(x *cudadrv.DevicePtr, l Layout, cols, rows int64, size int64) {
		if *x == 0 {
			return
		}
		list = append(list, x)
		bytes = append(bytes, ((p.Batch-1)*l.Stride+(cols-1)*l.LD+rows)*size)
	}
	stored := func(rows, cols int64, op cublasapi.Op) (int64, int64) {
		if op == cublasapi.Trans {
			return cols, rows
		}
		return rows, cols
	}
	rows, cols := stored(p.M, p.K, p.TransA)
	add(&at.A, p.A, cols, rows, sizeOf(p.A.Type))
	rows, cols = stored(p.K, p.N, p.TransB)
	add(&at.B, p.B, cols, rows, sizeOf(p.B.Type))
	if p.Separate {
		add(&at.C, p.C, p.N, p.M, sizeOf(p.C.Type))
	}
	add(&at.D, p.D, p.N, p.M, sizeOf(p.D.Type))
	aux := p.Aux
	if aux.Type == MaskType {
		aux.LD, aux.Stride = aux.LD/8, aux.Stride/8
		add(&at.Aux, aux, p.N, (p.M+7)/8, 1)
	} else {
		add(&at.Aux, aux, p.N, p.M, sizeOf(aux.Type))
	}
	add(&at.Bias, p.Bias, 1, max(p.M, p.N), sizeOf(p.Bias.Type))
	add(&at.AMax, Layout{}, 1, 1, 4)
	return list, bytes
}

func sizeOf(t cublasapi.DType) int64 {
	switch t {
	case cublasapi.R64F:
		return 8
	case cublasapi.R32F:
		return 4
	case cublasapi.R16F, cublasapi.R16BF:
		return 2
	}
	return 1
}

// alignUp keeps copies apart.
const alignUp = 512

// copyOperands allocates the copies, stream-ordered and at addresses with the
// same alignments as the operands.
func (t *tuning) copyOperands() error {
	at := t.product.At
	_, bytes := t.spans(&at)
	total := int64(0)
	for _, n := range bytes {
		total += (n+alignUp-1)/alignUp*alignUp + alignUp
	}
	for range t.o.Rotating/total + 1 {
		block, err := memory.AllocRaw(t.s, int(total))
		if err != nil {
			return err
		}
		t.blocks = append(t.blocks, block)
		set := t.product.At
		list, bytes := t.spans(&set)
		next := block
		for i, x := range list {
			to := cudadrv.DevicePtr(next) + *x%256
			if err := t.fill(to, *x, bytes[i]); err != nil {
				return err
			}
			*x = to
			next += uint64((bytes[i]+alignUp-1)/alignUp*alignUp + alignUp)
		}
		if !t.product.Separate {
			set.C = set.D
		}
		t.copies = append(t.copies, set)
	}
	return nil
}

// fill copies an operand. The bias may be shorter than its span, which is the
// longer side.
func (t *tuning) fill(to, from cudadrv.DevicePtr, bytes int64) error {
	if from == t.product.At.Bias {
		bytes = t.biasBytes()
	}
	return t.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoDAsync(to, from, uintptr(bytes), gpu.StreamOf(t.s).Raw())
	})
}

// biasBytes returns the bytes of the bias, or of its gradient.
func (t *tuning) biasBytes() int64 {
	p := &t.product.Problem
	n := p.M
	if p.Epilogue == cublasapi.EpilogueBGradB {
		n = p.N
	}
	return ((p.Batch-1)*p.Bias.Stride + n) * sizeOf(p.Bias.Type)
}

func (t *tuning) free() error {
	var errs []error
	for _, b := range t.blocks {
		errs = append(errs, memory.FreeRaw(t.s.Device(), b))
	}
	t.blocks = nil
	return errors.Join(errs...)
}

// compare checks the result of the first copy against that of the default
// algorithm.
func (t *tuning) compare() error {
	at := t.product.At
	list, sizes := t.spans(&at)
	n := int64(0)
	for i, x := range list {
		if x == &at.D {
			n = sizes[i]
		}
	}
	host := make([]byte, n)
	err := t.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(unsafe.Pointer(&host[0]), t.copies[0].D, uintptr(n), gpu.StreamOf(t.s).Raw())
	})
	if err == nil {
		err = t.s.Sync(t.ctx)
	}
	if err == nil { // the trial of the next algorithm starts from the same c
		err = t.fill(t.copies[0].D, t.product.At.D, n)
	}
	if err != nil {
		return err
	}
	got := decode(t.p.D.Type, host)
	if t.want == nil {
		t.want = got
		return nil
	}
	for i, w := range t.want {
		if g := got[i]; math.Abs(g-w) > t.o.ATol+t.o.RTol*math.Abs(w) || math.IsNaN(g) != math.IsNaN(w) {
			return errDiffers
		}
	}
	return nil
}

// decode returns the elements of a type.
func decode(t cublasapi.DType, b []byte) []float64 {
	out := make([]float64, int64(len(b))/sizeOf(t))
	switch t {
	case cublasapi.R64F:
		copy(out, unsafe.Slice((*float64)(unsafe.Pointer(&b[0])), len(out)))
		return out
	case cublasapi.R32F:
		for i, v := range unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(out)) {
			out[i] = float64(v)
		}
		return out
	}
	narrow := make([]float32, len(out))
	dtype.ByCUDA(t).Format.DecodeBytes(narrow, b)
	for i, v := range narrow {
		out[i] = float64(v)
	}
	return out
}

// A random has a product with random operands, which it frees.
type random struct {
	s      *stream.Stream
	blocks []uint64
}

// tuneRandom tunes a problem on random operands.
func tuneRandom(ctx context.Context, s *stream.Stream, p *Problem, o *TuneOptions) (r Result, err error) {
	x := &random{s: s}
	product := &Product{Problem: *p, Factors: [2]float64{1, 0}}
	if err = x.operands(product); err == nil {
		err = x.values(product)
	}
	if err == nil {
		r, err = Tune(ctx, s, product, o)
	}
	return r, errors.Join(err, x.free())
}

func (x *random) free() error {
	var errs []error
	for _, b := range x.blocks {
		errs = append(errs, memory.FreeRaw(x.s.Device(), b))
	}
	return errors.Join(errs...)
}

// alloc returns random numbers at an address whose alignment has the given logarithm.
func (x *random) alloc(bytes int64, align uint8, t cublasapi.DType) (cudadrv.DevicePtr, error) {
	b, err := memory.AllocRaw(x.s, int(bytes)+alignUp)
	if err != nil {
		return 0, err
	}
	x.blocks = append(x.blocks, b)
	p := cudadrv.DevicePtr(b)
	if align < 8 {
		p += 1 << align
	}
	return p, fillRandom(x.s, p, bytes, t)
}

// operands allocates the matrices, the bias and the auxiliary buffer.
func (x *random) operands(product *Product) (err error) {
	p, at := &product.Problem, &product.At
	// Every operand that the problem has gets an address, so that spans lists it.
	at.A, at.B, at.D = 1, 1, 1
	if p.Separate && !narrow(p.D.Type) {
		at.C = 1
	}
	if p.Aux != (Layout{}) {
		at.Aux = 1
	}
	if p.Bias != (Layout{}) {
		at.Bias = 1
	}
	t := &tuning{product: *product}
	list, sizes := t.spans(at)
	for i, ptr := range list {
		align, ty := p.align[alignD], p.D.Type
		if ptr == &at.D && !p.Separate {
			align = p.align[alignC] // without the bias
		}
		switch ptr {
		case &at.A:
			align, ty = p.align[alignA], p.A.Type
		case &at.B:
			align, ty = p.align[alignB], p.B.Type
		case &at.C:
			align, ty = p.align[alignC], p.C.Type
		}
		if *ptr, err = x.alloc(sizes[i], align, ty); err != nil {
			return err
		}
	}
	if !p.Separate {
		at.C = at.D
	}
	return nil
}

// values writes the factors and scales to the device.
func (x *random) values(product *Product) (err error) {
	p, at := &product.Problem, &product.At
	const align = 8
	if p.DeviceScalars {
		if at.Alpha, err = x.alloc(8, align, p.scaleType()); err == nil {
			at.Beta, err = x.alloc(8, align, p.scaleType())
		}
	}
	if p.RowScales && err == nil {
		if at.ScaleA, err = x.alloc(4*p.M, align, cublasapi.R32F); err == nil {
			at.ScaleB, err = x.alloc(4*p.N, align, cublasapi.R32F)
		}
	}
	return err
}

func narrow(t cublasapi.DType) bool { return t == cublasapi.R8FE4M3 || t == cublasapi.R8FE5M2 }

// pattern is the number of random bytes that are repeated.
const pattern = 1 << 20

// fillRandom writes numbers between -1 and 1, because zeros would make products
// faster than real data.
func fillRandom(s *stream.Stream, to cudadrv.DevicePtr, bytes int64, t cublasapi.DType) error {
	n := min(bytes, pattern)
	host := randomBytes(int(n/sizeOf(t)), t)
	dev, raw := gpu.DeviceOf(s.Device()), gpu.StreamOf(s).Raw()
	n = int64(len(host))
	if n == 0 {
		return nil
	}
	err := dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(to, unsafe.Pointer(&host[0]), uintptr(n), raw)
	})
	for have := n; err == nil && have < bytes; {
		more := min(have, bytes-have)
		err = dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(to+cudadrv.DevicePtr(have), to, uintptr(more), raw)
		})
		have += more
	}
	if err == nil {
		err = gpu.StreamOf(s).Sync() // the host's bytes are read until then
	}
	return err
}

func randomBytes(n int, t cublasapi.DType) []byte {
	b := make([]byte, n*int(sizeOf(t)))
	r := rand.New(rand.NewPCG(1, 2))
	v := make([]float32, n)
	for i := range v {
		v[i] = 2*r.Float32() - 1
	}
	switch t {
	case cublasapi.R64F:
		for i, x := range v {
			*(*float64)(unsafe.Pointer(&b[8*i])) = float64(x)
		}
	case cublasapi.R32F:
		for i, x := range v {
			*(*float32)(unsafe.Pointer(&b[4*i])) = x
		}
	default:
		dtype.ByCUDA(t).Format.EncodeBytes(b, v)
	}
	return b
}
