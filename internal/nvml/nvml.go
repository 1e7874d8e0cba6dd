// Package nvml reads telemetry, the health and the list of GPUs from NVIDIA's management library
// (NVML), without starting CUDA.
//
// Two bindings make the same calls: go-nvml in programs built with cgo, and internal/dl in
// the others and in those with the tag nonvml. The library is opened at its first use.
package nvml

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// API is the part of NVML that Chorus uses. Methods are safe for concurrent use.
type API interface {
	// UUIDs returns the UUIDs of all GPUs of the machine, such as GPU-8f6d…, in
	// PCI bus order. It ignores CUDA_VISIBLE_DEVICES.
	UUIDs() ([]string, error)
	// MIG reports whether a GPU is partitioned. CUDA then counts other devices
	// than NVML.
	MIG() (bool, error)
	// Device returns a GPU, or an instance of MIG, by its UUID.
	Device(uuid string) (Device, error)
}

// A Device reads the sensors of one GPU. If the GPU does not have a sensor, the
// method returns an *UnsupportedError.
type Device interface {
	Utilization() (gpu, memory int, err error) // percent of the last sample period
	Temperature() (celsius int, err error)
	Power() (milliwatts int, err error)
	SMClock() (mhz int, err error)
	MemoryUsed() (bytes uint64, err error)
	Processes() ([]Process, error) // compute processes
	NVLinks() ([]bool, error)      // whether each link is up
}

// A Process is a process with a context on a GPU.
type Process struct {
	PID   int
	Bytes uint64 // of the GPU's memory; 0 if the driver does not report it
}

// Open opens the library and initializes NVML, once in a process.
func Open() (API, error) { return opened() }

var opened = dl.Once(spec, openLib)

// openLib initializes the library by the binding of this build.
func openLib(find dl.Resolver, path string) (API, error) { return start(bind(find, path)) }

var spec = &dl.Spec{
	Name:    "NVML",
	Env:     env.LibNVML,
	Sonames: []string{"libnvidia-ml.so.1"},
	Folders: []string{
		"/usr/local/nvidia/lib64", // containers
		"/usr/lib/wsl/lib",
		"/run/opengl-driver/lib", // NixOS
	},
}

// An UnsupportedError names a missing requirement. It matches errors.ErrUnsupported.
type UnsupportedError struct{ Need, Have string }

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("nvml: needs %s; there is %s", e.Need, e.Have)
}

// Is reports whether target is errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// An Error is a failed call of NVML.
type Error struct {
	Op   string // the C function
	Code int    // nvmlReturn_t
	Text string // NVML's description
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s (%d)", e.Op, e.Text, e.Code) }

// lib is NVML. It is never shut down.
type lib struct{ raw }

// start initializes the library of a binding.
func start(r raw, err error) (API, error) {
	if err != nil {
		return nil, err
	}
	l := lib{r}
	if code := l.init(); code != success {
		return nil, l.fail("nvmlInit_v2", code)
	}
	return l, nil
}

func (l lib) UUIDs() ([]string, error) {
	var uuids []string
	err := l.each(func(d rawDevice) error {
		u, r := d.uuid()
		uuids = append(uuids, u)
		return l.fail("nvmlDeviceGetUUID", r)
	})
	return uuids, err
}

func (l lib) MIG() (bool, error) {
	partitioned := false
	err := l.each(func(d rawDevice) error {
		current, _, r := d.migMode()
		if r == notSupported {
			return nil
		}
		partitioned = partitioned || current != 0
		return l.fail("nvmlDeviceGetMigMode", r)
	})
	return partitioned, err
}

func (l lib) each(f func(rawDevice) error) error {
	n, r := l.count()
	if r != success {
		return l.fail("nvmlDeviceGetCount_v2", r)
	}
	for i := range n {
		d, r := l.byIndex(i)
		if r != success {
			return l.fail("nvmlDeviceGetHandleByIndex_v2", r)
		}
		if err := f(d); err != nil {
			return err
		}
	}
	return nil
}

// Device accepts a UUID as CUDA returns it. CUDA also writes the prefix GPU- for
// an instance of MIG.
func (l lib) Device(uuid string) (Device, error) {
	d, r := l.byUUID(uuid)
	if instance, gpu := strings.CutPrefix(uuid, "GPU-"); gpu && (r == notFound || r == invalidArgument) {
		if m, r := l.byUUID("MIG-" + instance); r == success {
			return device{m, l}, nil
		}
	}
	if r != success {
		return nil, l.fail("nvmlDeviceGetHandleByUUID", r)
	}
	return device{d, l}, nil
}

type device struct {
	raw rawDevice
	lib lib
}

func (d device) Utilization() (gpu, memory int, err error) {
	g, m, r := d.raw.utilization()
	return int(g), int(m), d.lib.fail("nvmlDeviceGetUtilizationRates", r)
}

func (d device) Temperature() (int, error) {
	v, r := d.raw.temperature()
	return int(v), d.lib.fail("nvmlDeviceGetTemperature", r)
}

func (d device) Power() (int, error) {
	v, r := d.raw.powerUsage()
	return int(v), d.lib.fail("nvmlDeviceGetPowerUsage", r)
}

func (d device) SMClock() (int, error) {
	v, r := d.raw.smClock()
	return int(v), d.lib.fail("nvmlDeviceGetClockInfo", r)
}

func (d device) MemoryUsed() (uint64, error) {
	v, r := d.raw.memoryUsed()
	return v, d.lib.fail("nvmlDeviceGetMemoryInfo", r)
}

func (d device) Processes() ([]Process, error) {
	list, r := d.raw.computeProcesses()
	if r != success {
		return nil, d.lib.fail("nvmlDeviceGetComputeRunningProcesses", r)
	}
	for i, p := range list {
		if p.Bytes == math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
			list[i].Bytes = 0
		}
	}
	return list, nil
}

// NVLinks queries links until NVML rejects an index, because NVML does not report
// the number of links.
func (d device) NVLinks() ([]bool, error) {
	var up []bool
	for i := range maxNVLinks {
		enabled, r := d.raw.nvLinkState(i)
		switch {
		case r == invalidArgument, i > 0 && r == notSupported:
			return up, nil
		case r != success:
			return nil, d.lib.fail("nvmlDeviceGetNvLinkState", r)
		}
		up = append(up, enabled)
	}
	return up, nil
}

// fail converts a result to an error.
func (l lib) fail(op string, r Return) error {
	switch r {
	case success:
		return nil
	case notSupported:
		return &UnsupportedError{Need: "a device with this sensor", Have: fmt.Sprintf("a device for which %s returns %q", op, l.text(r))}
	case functionNotFound:
		return &UnsupportedError{Need: "a driver with " + op, Have: "an older one"}
	case driverNotLoaded:
		return &UnsupportedError{Need: "the NVIDIA kernel driver", Have: "no running driver (" + l.text(r) + ")"}
	}
	return &Error{Op: op, Code: int(r), Text: l.text(r)}
}

// A raw is NVML as one of the two bindings calls it: C names, C widths, no policy.
type raw interface {
	init() Return
	text(Return) string
	count() (int, Return)
	byIndex(i int) (rawDevice, Return)
	byUUID(uuid string) (rawDevice, Return)
}

// A rawDevice has the calls with an nvmlDevice_t.
type rawDevice interface {
	uuid() (string, Return)
	migMode() (current, pending uint32, r Return)
	utilization() (gpu, memory uint32, r Return)
	temperature() (celsius uint32, r Return)
	powerUsage() (milliwatts uint32, r Return)
	smClock() (mhz uint32, r Return)
	memoryUsed() (bytes uint64, r Return)
	computeProcesses() ([]Process, Return)
	nvLinkState(link int) (enabled bool, r Return)

	name() (string, Return)
	pciBusID() (string, Return)
	persistence() (mode uint32, r Return)
	computeMode() (mode uint32, r Return)
	eccMode() (current, pending uint32, r Return)
	totalECC(kind, counter uint32) (uint64, Return)
	memoryErrors(kind, counter, location uint32) (uint64, Return)
	remappedRows() (RemappedRows, Return)
	clockEvents() (uint64, Return)
	powerLimit() (milliwatts uint32, r Return)
	defaultPowerLimit() (milliwatts uint32, r Return)
	pcieReplays() (uint32, Return)
	nvLinkErrors(link int, counter uint32) (uint64, Return)
	field(id, scope uint32) (fieldValue, Return)
	fabric() (Fabric, Return)
}

// A Return is an nvmlReturn_t.
type Return int32

// The results that Chorus distinguishes.
const (
	success          Return = 0
	invalidArgument  Return = 2
	notSupported     Return = 3
	notFound         Return = 6
	insufficientSize Return = 7
	driverNotLoaded  Return = 9
	functionNotFound Return = 13
)

// maxNVLinks is NVML_NVLINK_MAX_LINKS of the newest header.
const maxNVLinks = 36
