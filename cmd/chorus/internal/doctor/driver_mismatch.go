package doctor

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/gochorus/chorus/internal/nvml"
)

var driverMismatch = &Check{
	ID: "driver-mismatch", Scope: ScopeHost, Source: "/proc/driver/nvidia/version, libcuda, cuInit",
	Hazard: "The kernel driver and libcuda have different versions, or CUDA does not start.",
	Needs:  []string{"device-nodes"},
	Run:    one(checkDriver),
}

var driverVersion = regexp.MustCompile(`\b\d{3,}\.\d+(\.\d+)?\b`)

// Results of cuInit and of NVML that name a cause.
const (
	nvmlMismatch        = 18  // NVML_ERROR_LIB_RM_VERSION_MISMATCH
	cudaNotReady        = 802 // CUDA_ERROR_SYSTEM_NOT_READY
	cudaDriverMismatch  = 803 // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
	cudaCompatMode      = 804 // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
	cureDriver          = "reload the kernel modules or restart the host; remove libcuda from the container's image"
	causeDriverMismatch = "cuInit fails: the kernel driver and libcuda must have the same version"
)

func checkDriver(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	kernel, err := h.driverVersion()
	if err != nil {
		return unread(err)
	}
	c := h.CUDA()
	if c.Err != nil {
		return fail(c.Err.Error(), "libcuda of driver "+kernel, "no program can use CUDA", "install the driver's libraries; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility")
	}
	user := driverVersion.FindString(c.Path[strings.LastIndexByte(c.Path, '/')+1:])
	found := fmt.Sprintf("kernel driver %s, libcuda %s", kernel, user)
	want := "equal versions, and cuInit succeeds"
	switch {
	case c.Code == cudaDriverMismatch || c.Code == cudaCompatMode || c.Code == 0 && user != "" && user != kernel && !strings.Contains(c.Path, "compat"):
		return fail(found, want, causeDriverMismatch, cureDriver)
	case c.Code == cudaNotReady:
		return unknown("cuInit returns 802, which the check fabric-manager explains")
	case c.Code != 0:
		return fail(fmt.Sprintf("cuInit returns %d: %s", c.Code, c.Meaning), want, "no program can use CUDA", cureDriver)
	}
	_, err = h.gpus()
	if e, ok := errors.AsType[*nvml.Error](err); ok && e.Code == nvmlMismatch {
		return fail(err.Error(), want, "the state of the GPUs is not readable: NVML and the kernel driver must have the same version", cureDriver)
	}
	if err != nil {
		return unread(err)
	}
	return pass(found, want)
}

// driverVersion returns the version of the kernel driver.
func (h *Host) driverVersion() (string, error) {
	text, err := h.read("proc/driver/nvidia/version")
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(text, "\n")
	v := driverVersion.FindString(line)
	if v == "" {
		return "", fmt.Errorf("/proc/driver/nvidia/version has no version: %q", line)
	}
	return v, nil
}
