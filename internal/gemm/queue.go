package gemm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/timeline"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// maxPlans is the number of plans that a stream keeps. When there are more, all are dropped.
const maxPlans = 1024

// A queue has the products of a stream.
type queue struct {
	s    *stream.Stream
	dev  *gpu.Device
	site *site

	mu        sync.Mutex
	plans     map[Problem]*plan
	last      *plan
	workspace uint64 // allocated when an algorithm first needs it
	unaccount func() // for the workspace; nil without
	blas      *blas  // nil until cuBLAS is needed

	// The call in progress. The fields are part of the queue, and the function is a method
	// value made once, so that a call allocates nothing.
	now     Product
	plan    *plan
	room    cudadrv.DevicePtr // workspace of the call
	scalars scalars
	launch  func() error
}

var queueKey handle.Key

func queueOf(s *stream.Stream) (*queue, error) {
	if v, ok := gpu.StreamOf(s).Kept(&queueKey); ok {
		return v.(*queue), nil
	}
	v, err := gpu.StreamOf(s).Keep(&queueKey, func() (any, func() error, error) {
		site, err := siteOf(s.Device())
		if err != nil {
			return nil, nil, err
		}
		q := &queue{s: s, dev: gpu.DeviceOf(s.Device()), site: site, plans: map[Problem]*plan{}}
		q.launch = q.enqueue
		return q, q.close, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*queue), nil
}

// Enqueue enqueues a product on s, after the caller has checked the shapes and
// that the memory is of the device of s. If s is being captured, the workspace
// belongs to the graph.
func Enqueue(s *stream.Stream, p *Product) error {
	q, err := queueOf(s)
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.now = *p
	switch {
	case q.now.DeviceScalars && q.now.returnsEarly():
		return &device.UnsupportedError{
			Feature: "factors on the device, if c has one row or one column, for a product with a bias, an epilogue or a separate input for beta",
			Need:    "factors on the host", Have: "cuBLASLt, which writes no output if it reads an alpha of 0 and a beta of 1"}
	case !q.now.needsNoProduct():
		return q.enqueueNow()
	}
	zeros, err := q.replaceProduct()
	if err == nil {
		err = q.enqueueNow()
	}
	return errors.Join(err, memory.FreeRaw(s.Device(), zeros))
}

// enqueueNow enqueues the call in progress.
func (q *queue) enqueueNow() error {
	s := q.s
	q.now.workspace = q.site.workspace
	q.now.setAlignments()
	if err := q.prepare(); err != nil {
		return err
	}
	if o := online.Load(); o != nil && !q.plan.tuned && !q.plan.blas && !gpu.AnyCapture() {
		if err := q.tuneFirst(o); err != nil {
			return err
		}
	}
	captured, err := q.takeRoom()
	if err != nil {
		return err
	}
	if q.plan.blas {
		err = q.adjust()
	}
	if err == nil {
		span := gpu.StreamOf(s).Span(timeline.Kernel, "matrix product")
		err = q.bound(q.launch)
		span.End(err)
	}
	if err == nil {
		gpu.StreamOf(s).Uses("matrix product", false, q.uses)
	}
	if captured {
		err = errors.Join(err, memory.FreeRaw(s.Device(), uint64(q.room)))
	}
	return err
}

// takeRoom sets the workspace of the call. A captured product gets one from the
// pool of the capture, which the caller frees, so that later allocations of the
// capture reuse it. All other products of the stream share one workspace.
func (q *queue) takeRoom() (captured bool, err error) {
	if q.room = 0; q.plan.need == 0 {
		return false, nil
	}
	if gpu.AnyCapture() {
		if captured, err = gpu.StreamOf(q.s).Capturing(); err != nil {
			return false, err
		}
	}
	if captured {
		room, err := memory.AllocRaw(q.s, int(q.plan.need))
		q.room = cudadrv.DevicePtr(room)
		return true, err
	}
	if q.workspace == 0 {
		err = q.allocate()
	}
	q.room = cudadrv.DevicePtr(q.workspace)
	return false, err
}

// allocate allocates the workspace of the stream.
func (q *queue) allocate() (err error) {
	if q.workspace, err = memory.AllocRaw(q.s, int(q.site.workspace)); err != nil {
		return err
	}
	use := inside.Use{Owner: "workspaces of matrix products", Bytes: uint64(q.site.workspace), Inside: true}
	q.unaccount = inside.Account(q.s.Device(), func() (inside.Use, bool) { return use, true })
	return nil
}

// bound calls a library once with the device's context bound. The first calls of a library
// allocate and load kernels, which CUDA forbids to threads that capture a graph, although it
// does not affect the capture.
func (q *queue) bound(call func() error) error { return bound(q.dev, call) }

func bound(dev *gpu.Device, call func() error) error {
	if !gpu.AnyCapture() {
		return dev.Bound(call)
	}
	return dev.Bound(func() error { return dev.Relaxed(call) })
}

// prepare finds or makes the plan of the call.
func (q *queue) prepare() error {
	p := q.last
	if p == nil || p.Problem != q.now.Problem {
		p = q.plans[q.now.Problem]
	}
	if p != nil && p.chosen == q.site.choices.version.Load() {
		q.last, q.plan = p, p
		return q.point(p)
	}
	if p != nil { // an algorithm was tuned since
		delete(q.plans, p.Problem)
		q.last = nil
		if err := q.drop(p); err != nil {
			return err
		}
	}
	if len(q.plans) >= maxPlans {
		if err := q.forget(); err != nil {
			return err
		}
	}
	p, err := q.newPlan()
	if err != nil {
		return fmt.Errorf("%s: %w", &q.now.Problem, err)
	}
	q.plans[p.Problem], q.last, q.plan = p, p, p
	return nil
}

// enqueue calls cuBLASLt.
func (q *queue) enqueue() error {
	q.scalars.set(&q.now)
	if q.plan.blas {
		return q.enqueueBLAS()
	}
	p, x := q.plan, &q.now.At
	alpha, beta := q.scalars.of(&q.now)
	r := q.site.lt.Matmul(q.site.handle, p.desc, alpha, cublasapi.LtMatrix{Ptr: x.A, Layout: p.layouts[0]},
		cublasapi.LtMatrix{Ptr: x.B, Layout: p.layouts[1]}, beta, cublasapi.LtMatrix{Ptr: x.C, Layout: p.layouts[2]},
		cublasapi.LtMatrix{Ptr: x.D, Layout: p.layouts[3]}, &p.algo, q.room, p.need, gpu.StreamOf(q.s).Raw())
	return failed("cublasLtMatmul", r)
}

// forget drops all plans.
func (q *queue) forget() error {
	var errs []error
	for _, p := range q.plans {
		errs = append(errs, q.drop(p))
	}
	clear(q.plans)
	q.last = nil
	return errors.Join(errs...)
}

// close frees the plans, the handle and the workspace at the end of the stream.
func (q *queue) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	errs := []error{q.forget(), q.closeBLAS()}
	if q.workspace != 0 {
		q.unaccount()
		errs = append(errs, memory.FreeRaw(q.s.Device(), q.workspace))
		q.workspace = 0
	}
	return errors.Join(errs...)
}

// A Status is the error of a call of cuBLAS or cuBLASLt.
type Status struct {
	Call   string
	Result cublasapi.Result
}

func (e *Status) Error() string { return e.Call + ": " + e.Result.Error() }

// Unwrap returns the result.
func (e *Status) Unwrap() error { return e.Result }

func failed(call string, r cublasapi.Result) error {
	if r == cublasapi.Success {
		return nil
	}
	return &Status{call, r}
}

// choices has the algorithms of a device.
type choices struct {
	version atomic.Uint64 // counts changes of choices that plans may have
	mu      sync.RWMutex
	list    map[Problem]choice
	file    map[string]Result    // results of files by Op and Params
	untuned map[Problem]struct{} // recorded problems; nil while nothing is recorded
}

// blas is the cuBLAS of a stream. Each stream has a handle, so that products of several
// streams do not share a workspace.
type blas struct {
	api    cublasapi.API
	handle cublasapi.Handle

	// The settings of the handle.
	workspace cudadrv.DevicePtr
	math      cublasapi.Math
	mode      cublasapi.PointerMode
	sms       int32
}

// prepareBLAS creates the handle, and what the plan needs.
func (q *queue) prepareBLAS(p *plan) error {
	p.need = uintptr(q.site.workspace)
	if q.blas != nil {
		return nil
	}
	api, err := q.dev.System().CUBLAS()
	if err != nil {
		return err
	}
	b := &blas{api: api}
	if err := q.bound(func() (err error) {
		var r cublasapi.Result
		b.handle, r = api.Create()
		return failed("cublasCreate", r)
	}); err != nil {
		return err
	}
	q.blas = b
	err = q.bound(func() error { return failed("cublasSetStream", api.SetStream(b.handle, gpu.StreamOf(q.s).Raw())) })
	if err != nil {
		_ = q.closeBLAS()
	}
	return err
}

// closeBLAS destroys the handle.
func (q *queue) closeBLAS() error {
	b := q.blas
	if b == nil {
		return nil
	}
	q.blas = nil
	return q.bound(func() error { return failed("cublasDestroy", b.api.Destroy(b.handle)) })
}

// adjust sets the handle for the call in progress. Each setting is one call, which needs the
// context.
func (q *queue) adjust() error {
	b := q.blas
	if b.workspace != q.room {
		b.workspace = 0
		err := q.bound(func() error {
			return failed("cublasSetWorkspace", b.api.SetWorkspace(b.handle, q.room, uintptr(q.site.workspace)))
		})
		if err != nil {
			return err
		}
		b.workspace = q.room
	}
	math, mode := cublasapi.DefaultMath, cublasapi.PointerModeHost
	if q.now.Schemes&cublasapi.ReductionOutputType == 0 {
		math = cublasapi.MathDisallowReducedPrecisionReduction
	}
	if q.now.DeviceScalars {
		mode = cublasapi.PointerModeDevice
	}
	if math != b.math {
		if err := q.bound(func() error { return failed("cublasSetMathMode", b.api.SetMathMode(b.handle, math)) }); err != nil {
			return err
		}
		b.math = math
	}
	if mode != b.mode {
		if err := q.bound(func() error { return failed("cublasSetPointerMode", b.api.SetPointerMode(b.handle, mode)) }); err != nil {
			return err
		}
		b.mode = mode
	}
	if sms := q.site.target(q.now.Carveout); sms != b.sms {
		if err := q.bound(func() error { return failed("cublasSetSmCountTarget", b.api.SetSmCountTarget(b.handle, sms)) }); err != nil {
			return err
		}
		b.sms = sms
	}
	return nil
}

// enqueueBLAS calls cuBLAS.
func (q *queue) enqueueBLAS() error {
	b, p := q.blas, &q.now
	alpha, beta := q.scalars.of(p)
	x := cublasapi.Matrix{Ptr: p.At.A, Type: p.A.Type, LD: int32(p.A.LD), Stride: p.A.Stride}
	y := cublasapi.Matrix{Ptr: p.At.B, Type: p.B.Type, LD: int32(p.B.LD), Stride: p.B.Stride}
	z := cublasapi.Matrix{Ptr: p.At.D, Type: p.D.Type, LD: int32(p.D.LD), Stride: p.D.Stride}
	m, n, k := int32(p.M), int32(p.N), int32(p.K)
	if p.Batch == 1 {
		return failed("cublasGemmEx", b.api.GemmEx(b.handle, p.TransA, p.TransB, m, n, k, alpha, x, y, beta, z, p.Compute, cublasapi.GemmDefault))
	}
	return failed("cublasGemmStridedBatchedEx", b.api.GemmStridedBatchedEx(b.handle, p.TransA, p.TransB, m, n, k,
		alpha, x, y, beta, z, int32(p.Batch), p.Compute, cublasapi.GemmDefault))
}
