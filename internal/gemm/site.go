package gemm

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// A site has the parts of products that the streams of a device share.
type site struct {
	choices choices

	mu        sync.Mutex // guards the first use
	known     bool
	workspace int64 // bytes for each stream
	sms       int32
	lt        cublasltapi.API
	handle    cublasltapi.Handle
}

var siteKey kept.Key

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
func (x *site) openLt(dev *gpu.Device) (cublasltapi.API, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.handle != 0 {
		return x.lt, nil
	}
	lt, err := dev.System().CUBLASLt()
	if err != nil {
		return nil, err
	}
	var h cublasltapi.Handle
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

var handlesKey kept.Key

func (x *handles) add(dev *gpu.Device, lt cublasltapi.API, h cublasltapi.Handle) {
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
