package gemm

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// A choice is the algorithm for a Problem on a device.
type choice struct {
	algo  cublasapi.Algo
	need  uintptr
	tuned *Result // nil if it is the heuristic's first suggestion
}

// maxChoices is the number of choices that a device keeps. When there are more, those that
// were not tuned are dropped.
const maxChoices = 16384

// suggestions is the number of algorithms that cuBLASLt is asked for.
const suggestions = 8

func (c *choices) find(p *Problem) (choice, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	x, ok := c.list[*p]
	return x, ok
}

func (c *choices) add(p *Problem, x choice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.list) >= maxChoices {
		for k, old := range c.list {
			if old.tuned == nil {
				delete(c.list, k)
			}
		}
	}
	c.list[*p] = x
}

// choose sets the plan's algorithm: the device's choice, the result of a file, or the first of
// the heuristic's that can run.
func (q *queue) choose(p *plan) error {
	x, ok := q.site.choices.find(&p.Problem)
	if !ok {
		x, ok = q.restore(p)
	}
	if !ok {
		list, err := q.suggest(p, suggestions)
		if err != nil {
			return err
		}
		x = choice{algo: list[0].Algo, need: list[0].WorkspaceSize}
		q.site.choices.add(&p.Problem, x)
	}
	if x.tuned == nil {
		q.site.choices.record(&p.Problem)
	}
	p.algo, p.need, p.tuned = x.algo, x.need, x.tuned != nil
	return nil
}

// suggest returns up to n algorithms that can run, the fastest first by
// cuBLASLt's estimate, and at least one unless it returns an error.
func (q *queue) suggest(p *plan, n int) ([]cublasapi.HeuristicResult, error) {
	lt := q.site.lt
	pref, r := lt.MatmulPreferenceCreate()
	if r != cublasapi.Success {
		return nil, failed("cublasLtMatmulPreferenceCreate", r)
	}
	err := prefer(lt, pref, &p.Problem)
	results, found := make([]cublasapi.HeuristicResult, n), int32(0)
	if err == nil {
		o := &cublasapi.Operation{Desc: p.desc, A: p.layouts[0], B: p.layouts[1], C: p.layouts[2], D: p.layouts[3]}
		err = q.bound(func() error {
			found, r = lt.MatmulAlgoGetHeuristic(q.site.handle, o, pref, results)
			return failed(heuristicCall, r)
		})
	}
	if err := errors.Join(err, failed("cublasLtMatmulPreferenceDestroy", lt.MatmulPreferenceDestroy(pref))); err != nil {
		return nil, err
	}
	usable := results[:0]
	for _, x := range results[:found] {
		if x.State == cublasapi.Success && int64(x.WorkspaceSize) <= p.workspace {
			usable = append(usable, x)
		}
	}
	if len(usable) == 0 {
		return nil, failed(heuristicCall, cublasapi.NotSupported)
	}
	return usable, nil
}

// prefer sets the limits for the choice.
func prefer(lt cublasapi.LtAPI, pref cublasapi.Preference, p *Problem) error {
	workspace, mask := uint64(p.workspace), p.Schemes
	r := lt.MatmulPreferenceSetAttribute(pref, cublasapi.PreferenceMaxWorkspaceBytes, unsafe.Pointer(&workspace), unsafe.Sizeof(workspace))
	if r == cublasapi.Success && mask != cublasapi.ReductionMask {
		r = lt.MatmulPreferenceSetAttribute(pref, cublasapi.PreferenceReductionSchemeMask, unsafe.Pointer(&mask), unsafe.Sizeof(mask))
	}
	for i, log := range p.align {
		if r != cublasapi.Success {
			break
		}
		bytes := uint32(1) << log
		r = lt.MatmulPreferenceSetAttribute(pref, cublasapi.PreferenceMinAlignmentABytes+cublasapi.PreferenceAttribute(i), unsafe.Pointer(&bytes), unsafe.Sizeof(bytes))
	}
	return failed("cublasLtMatmulPreferenceSetAttribute", r)
}

// check validates a problem that was read from a file, whose operands Chorus allocates.
func (p *Problem) check() error {
	const most = math.MaxInt32
	ok := min(p.M, p.N, p.K, p.Batch) > 0 && max(p.M, p.N, p.K, p.Batch) <= most
	for _, l := range []Layout{p.A, p.B, p.C, p.D} {
		ok = ok && typeName(l.Type) != "" && l.LD > 0 && l.LD <= most && l.Stride >= 0 && l.Stride <= 1<<50
	}
	for _, l := range []Layout{p.Aux, p.Bias} {
		ok = ok && (typeName(l.Type) != "" || l.Type == MaskType) && l.LD >= 0 && l.LD <= most*8 && l.Stride >= 0 && l.Stride <= 1<<50
	}
	for _, a := range p.align {
		ok = ok && a <= 8
	}
	if !ok || p.Library > CUBLASLt || p.Carveout < 0 {
		return fmt.Errorf("%s: a size, type or alignment is out of range", p)
	}
	for _, l := range []Layout{p.A, p.B, p.C, p.D, p.Aux, p.Bias} {
		// Not an int64, which could wrap around.
		size := float64(p.Batch-1)*float64(l.Stride) + float64(max(p.M, p.N, p.K))*float64(l.LD+1)
		if size > mostElements {
			return fmt.Errorf("%s: an operand has %.3g elements: want at most %d", p, size, mostElements)
		}
	}
	return p.checkEpilogue()
}

// mostElements limits an operand that was read from a file: no device has more memory.
const mostElements = 1 << 40

// Bits of epilogues of cuBLASLt.
const (
	epilogueBits = cublasapi.EpilogueDefault | cublasapi.EpilogueReLUAuxBias | cublasapi.EpilogueDReLUBGrad |
		cublasapi.EpilogueGELUAuxBias | cublasapi.EpilogueDGELUBGrad | cublasapi.EpilogueBGradA | cublasapi.EpilogueBGradB
	epilogueWithAux  = cublasapi.EpilogueReLUAux & cublasapi.EpilogueDGELU
	epilogueWithMask = cublasapi.EpilogueReLU | cublasapi.EpilogueDReLU&^epilogueWithAux
	epilogueWithBias = cublasapi.EpilogueBias | cublasapi.EpilogueDReLUBGrad&^cublasapi.EpilogueDReLU | cublasapi.EpilogueBGradA | cublasapi.EpilogueBGradB
)

// checkEpilogue validates that the product has the operands of its epilogue, in the types
// that the library expects.
func (p *Problem) checkEpilogue() error {
	e := p.Epilogue
	aux, mask, bias := e&epilogueWithAux != 0, e&epilogueWithAux != 0 && e&epilogueWithMask != 0, e&epilogueWithBias != 0
	switch {
	case e&^epilogueBits != 0, aux != (p.Aux != Layout{}), bias != (p.Bias != Layout{}):
		return fmt.Errorf("%s: the epilogue %d does not have these operands", p, e)
	case aux && mask != (p.Aux.Type == MaskType), mask && (p.Aux.LD%8 != 0 || p.Aux.Stride%8 != 0),
		aux && !mask && !p.Float8 && p.Aux.Type != p.D.Type:
		return fmt.Errorf("%s: the auxiliary operand of epilogue %d has the wrong type or strides", p, e)
	}
	return nil
}

// A site has the parts of products that the streams of a device share.
type site struct {
	choices choices

	mu        sync.Mutex // guards the first use
	known     bool
	workspace int64 // bytes for each stream
	sms       int32
	lt        cublasapi.LtAPI
	handle    cublasapi.LtHandle
}

var siteKey handle.Key

// siteOf returns the site of a device.
func siteOf(dev *device.Device) (*site, error) {
	x := gpu.DeviceOf(dev).Local(&siteKey, func() any { return &site{choices: choices{list: map[Problem]choice{}}} }).(*site)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.known {
		return x, nil
	}
	major, _, err := dev.Capability()
	if err != nil {
		return nil, err
	}
	if x.workspace, err = workspaceBytes(major); err != nil {
		return nil, err
	}
	if x.sms, err = gpu.DeviceOf(dev).Attribute(cudadrv.AttrMultiprocessorCount); err != nil {
		return nil, err
	}
	x.known = true
	return x, nil
}

// target returns the number of multiprocessors that a product uses; 0 means all.
func (x *site) target(carveout int32) int32 {
	if carveout == 0 {
		return 0
	}
	return max(1, x.sms-carveout)
}

// openLt opens cuBLASLt and makes the device's handle at the first use. If the library is
// missing, the error matches errors.ErrUnsupported.
func (x *site) openLt(dev *gpu.Device) (cublasapi.LtAPI, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.handle != 0 {
		return x.lt, nil
	}
	lt, err := dev.System().CUBLASLt()
	if err != nil {
		return nil, err
	}
	var h cublasapi.LtHandle
	err = bound(dev, func() error {
		var r cublasapi.Result
		h, r = lt.Create()
		return failed("cublasLtCreate", r)
	})
	if err != nil {
		return nil, err
	}
	x.lt, x.handle = lt, h
	dev.System().Local(&handlesKey, func() any { return new(handles) }).(*handles).add(dev, lt, h)
	return lt, nil
}

// handles are the handles of one System, which closes them.
type handles struct {
	mu   sync.Mutex
	list []func() error
}

var handlesKey handle.Key

func (x *handles) add(dev *gpu.Device, lt cublasapi.LtAPI, h cublasapi.LtHandle) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = append(x.list, func() error {
		return bound(dev, func() error { return failed("cublasLtDestroy", lt.Destroy(h)) })
	})
}

// Close destroys the handles.
func (x *handles) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var errs []error
	for _, destroy := range x.list {
		errs = append(errs, destroy())
	}
	x.list = nil
	return errors.Join(errs...)
}

// The workspaces of torch: 32 MiB from Hopper on, and otherwise ":4096:2:16:8".
const (
	hopper          = 9
	hopperWorkspace = 32 << 20
	otherWorkspace  = (4096*2 + 16*8) << 10
)

var (
	workspaceConfig = regexp.MustCompile(`^(:[0-9]+:[0-9]+)+$`)
	workspacePart   = regexp.MustCompile(`:([0-9]+):([0-9]+)`)
)

// workspaceBytes returns the workspace for each stream of a device: the sum of the buffers in
// CUBLAS_WORKSPACE_CONFIG, or torch's default.
func workspaceBytes(major int) (int64, error) {
	text := env.CUBLASWorkspaceConfig.Value()
	if text == "" {
		if major >= hopper {
			return hopperWorkspace, nil
		}
		return otherWorkspace, nil
	}
	bad := &env.ValueError{Name: env.CUBLASWorkspaceConfig.Name, Value: text, Want: "pairs of a size in KiB and a count, such as :4096:8, of at most 1 TiB in all"}
	if !workspaceConfig.MatchString(text) {
		return 0, bad
	}
	sum := int64(0)
	for _, m := range workspacePart.FindAllStringSubmatch(text, -1) {
		kib, err := strconv.ParseUint(m[1], 10, 30)
		count, err2 := strconv.ParseUint(m[2], 10, 30)
		if errors.Join(err, err2) != nil || kib*count > 1<<30 {
			return 0, bad
		}
		if sum += int64(kib * count); sum > 1<<30 {
			return 0, bad
		}
	}
	return sum << 10, nil
}

// Workspace returns the workspace of each stream of a device in bytes.
func Workspace(dev *device.Device) (int64, error) {
	x, err := siteOf(dev)
	if err != nil {
		return 0, fmt.Errorf("tensor: matmul on %s: %w", dev, err)
	}
	return x.workspace, nil
}
