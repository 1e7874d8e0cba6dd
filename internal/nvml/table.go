package nvml

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

// fn numbers the functions of libnvidia-ml that table calls.
type fn int

const (
	fnInit fn = iota
	fnErrorString
	fnGetCount
	fnGetHandleByIndex
	fnGetHandleByUUID
	fnGetUUID
	fnGetMigMode
	fnGetUtilizationRates
	fnGetTemperature
	fnGetPowerUsage
	fnGetClockInfo
	fnGetMemoryInfo
	fnGetComputeRunningProcesses
	fnGetNvLinkState
	fnGetName
	fnGetPciInfo
	fnGetPersistenceMode
	fnGetComputeMode
	fnGetEccMode
	fnGetTotalEccErrors
	fnGetMemoryErrorCounter
	fnGetRemappedRows
	fnGetCurrentClocksEventReasons
	fnGetPowerManagementLimit
	fnGetPowerManagementDefaultLimit
	fnGetPcieReplayCounter
	fnGetNvLinkErrorCounter
	fnGetFieldValues
	fnGetGpuFabricInfoV
	numFns
)

// symbols has the exported name of each function. The oldest supported driver has all of
// them; libraries of other systems may lack some.
var symbols = [numFns]dl.Func{
	fnInit:                       {Name: "nvmlInit_v2"},
	fnErrorString:                {Name: "nvmlErrorString"},
	fnGetCount:                   {Name: "nvmlDeviceGetCount_v2"},
	fnGetHandleByIndex:           {Name: "nvmlDeviceGetHandleByIndex_v2"},
	fnGetHandleByUUID:            {Name: "nvmlDeviceGetHandleByUUID"},
	fnGetUUID:                    {Name: "nvmlDeviceGetUUID"},
	fnGetMigMode:                 {Name: "nvmlDeviceGetMigMode", Optional: true},
	fnGetUtilizationRates:        {Name: "nvmlDeviceGetUtilizationRates", Optional: true},
	fnGetTemperature:             {Name: "nvmlDeviceGetTemperature", Optional: true},
	fnGetPowerUsage:              {Name: "nvmlDeviceGetPowerUsage", Optional: true},
	fnGetClockInfo:               {Name: "nvmlDeviceGetClockInfo", Optional: true},
	fnGetMemoryInfo:              {Name: "nvmlDeviceGetMemoryInfo", Optional: true},
	fnGetComputeRunningProcesses: {Name: "nvmlDeviceGetComputeRunningProcesses_v3", Optional: true},
	fnGetNvLinkState:             {Name: "nvmlDeviceGetNvLinkState", Optional: true},

	fnGetName:                        {Name: "nvmlDeviceGetName", Optional: true},
	fnGetPciInfo:                     {Name: "nvmlDeviceGetPciInfo_v3", Optional: true},
	fnGetPersistenceMode:             {Name: "nvmlDeviceGetPersistenceMode", Optional: true},
	fnGetComputeMode:                 {Name: "nvmlDeviceGetComputeMode", Optional: true},
	fnGetEccMode:                     {Name: "nvmlDeviceGetEccMode", Optional: true},
	fnGetTotalEccErrors:              {Name: "nvmlDeviceGetTotalEccErrors", Optional: true},
	fnGetMemoryErrorCounter:          {Name: "nvmlDeviceGetMemoryErrorCounter", Optional: true},
	fnGetRemappedRows:                {Name: "nvmlDeviceGetRemappedRows", Optional: true},
	fnGetCurrentClocksEventReasons:   {Name: "nvmlDeviceGetCurrentClocksEventReasons", Optional: true},
	fnGetPowerManagementLimit:        {Name: "nvmlDeviceGetPowerManagementLimit", Optional: true},
	fnGetPowerManagementDefaultLimit: {Name: "nvmlDeviceGetPowerManagementDefaultLimit", Optional: true},
	fnGetPcieReplayCounter:           {Name: "nvmlDeviceGetPcieReplayCounter", Optional: true},
	fnGetNvLinkErrorCounter:          {Name: "nvmlDeviceGetNvLinkErrorCounter", Optional: true},
	fnGetFieldValues:                 {Name: "nvmlDeviceGetFieldValues", Optional: true},
	fnGetGpuFabricInfoV:              {Name: "nvmlDeviceGetGpuFabricInfoV", Optional: true},
}

// table calls NVML by internal/dl.
type table struct{ dl.Table[fn, Return] }

func bindTable(find dl.Resolver, path string) (raw, error) {
	t, missing := dl.NewTable[fn](find, path, symbols[:], functionNotFound)
	if len(missing) > 0 {
		return nil, &dl.VersionError{Library: spec.Name, Path: path, Needed: "the library of driver R535", Missing: missing}
	}
	return &table{t}, nil
}

func (t *table) init() Return         { return t.Call(fnInit, dl.Get()) }
func (t *table) text(r Return) string { return t.Text(fnErrorString, dl.Get().In(uintptr(r))) }

func (t *table) count() (int, Return) {
	n, r := t.Call1(fnGetCount, dl.Get().Out())
	return int(uint32(n)), r
}

func (t *table) byIndex(i int) (rawDevice, Return) {
	h, r := t.Call1(fnGetHandleByIndex, dl.Get().In(uintptr(i)).Out())
	return tableDevice{t, uintptr(h)}, r
}

func (t *table) byUUID(uuid string) (rawDevice, Return) {
	h, r := t.Call1(fnGetHandleByUUID, dl.Get().String(uuid).Out())
	return tableDevice{t, uintptr(h)}, r
}

type tableDevice struct {
	t      *table
	handle uintptr
}

func (d tableDevice) frame() *dl.Frame { return dl.Get().In(d.handle) }

// value calls a function with one unsigned int as its result.
func (d tableDevice) value(n fn, f *dl.Frame) (uint32, Return) {
	v, r := d.t.Call1(n, f.Out())
	return uint32(v), r
}

func (d tableDevice) uuid() (string, Return) { return d.text(fnGetUUID) }

func (d tableDevice) migMode() (current, pending uint32, _ Return) {
	c, p, r := d.t.Call2(fnGetMigMode, d.frame().Out().Out())
	return uint32(c), uint32(p), r
}

// utilization reads an nvmlUtilization_t: two unsigned ints.
func (d tableDevice) utilization() (gpu, memory uint32, r Return) {
	v, r := d.t.Call1(fnGetUtilizationRates, d.frame().Out())
	return uint32(v), uint32(v >> 32), r
}

func (d tableDevice) temperature() (uint32, Return) {
	const gpu = 0 // NVML_TEMPERATURE_GPU
	return d.value(fnGetTemperature, d.frame().In(gpu))
}

func (d tableDevice) powerUsage() (uint32, Return) { return d.value(fnGetPowerUsage, d.frame()) }

func (d tableDevice) smClock() (uint32, Return) {
	const sm = 1 // NVML_CLOCK_SM
	return d.value(fnGetClockInfo, d.frame().In(sm))
}

func (d tableDevice) memoryUsed() (uint64, Return) {
	m := new(struct{ total, free, used uint64 }) // nvmlMemory_t
	r := d.t.Call(fnGetMemoryInfo, d.frame().Ptr(unsafe.Pointer(m)))
	return m.used, r
}

// A processInfo is an nvmlProcessInfo_t.
type processInfo struct {
	pid                              uint32
	bytes                            uint64
	gpuInstanceID, computeInstanceID uint32
}

// computeProcesses repeats the call with more room while processes start.
func (d tableDevice) computeProcesses() ([]Process, Return) {
	for room := 32; ; room *= 2 {
		infos := make([]processInfo, room)
		n, r := d.t.Call1(fnGetComputeRunningProcesses, d.frame().InOut(uint64(room)).Ptr(unsafe.Pointer(&infos[0])))
		if r == insufficientSize && room < 1<<20 {
			continue
		}
		if r != success {
			return nil, r
		}
		list := make([]Process, min(int(uint32(n)), room))
		for i := range list {
			list[i] = Process{PID: int(infos[i].pid), Bytes: infos[i].bytes}
		}
		return list, r
	}
}

func (d tableDevice) nvLinkState(link int) (bool, Return) {
	v, r := d.value(fnGetNvLinkState, d.frame().In(uintptr(link)))
	return v != 0, r
}

func (d tableDevice) name() (string, Return) { return d.text(fnGetName) }

// text calls a function that fills a buffer.
func (d tableDevice) text(n fn) (string, Return) {
	b := make([]byte, 96) // NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE
	r := d.t.Call(n, d.frame().Ptr(unsafe.Pointer(&b[0])).In(uintptr(len(b))))
	return dl.CString(b), r
}

func (d tableDevice) pciBusID() (string, Return) {
	p := new(struct { // nvmlPciInfo_t
		legacy                                           [16]byte
		domain, bus, device, pciDeviceID, pciSubSystemID uint32
		id                                               [32]byte
	})
	r := d.t.Call(fnGetPciInfo, d.frame().Ptr(unsafe.Pointer(p)))
	return dl.CString(p.id[:]), r
}

func (d tableDevice) persistence() (uint32, Return) {
	return d.value(fnGetPersistenceMode, d.frame())
}

func (d tableDevice) computeMode() (uint32, Return) { return d.value(fnGetComputeMode, d.frame()) }

func (d tableDevice) eccMode() (current, pending uint32, _ Return) {
	c, p, r := d.t.Call2(fnGetEccMode, d.frame().Out().Out())
	return uint32(c), uint32(p), r
}

func (d tableDevice) totalECC(kind, counter uint32) (uint64, Return) {
	return d.t.Call1(fnGetTotalEccErrors, d.frame().In(uintptr(kind), uintptr(counter)).Out())
}

func (d tableDevice) memoryErrors(kind, counter, location uint32) (uint64, Return) {
	return d.t.Call1(fnGetMemoryErrorCounter, d.frame().In(uintptr(kind), uintptr(counter), uintptr(location)).Out())
}

func (d tableDevice) remappedRows() (RemappedRows, Return) {
	v := new([4]uint32)
	f := d.frame()
	for i := range v {
		f.Ptr(unsafe.Pointer(&v[i]))
	}
	r := d.t.Call(fnGetRemappedRows, f)
	return RemappedRows{int(v[0]), int(v[1]), v[2] != 0, v[3] != 0}, r
}

func (d tableDevice) clockEvents() (uint64, Return) {
	return d.t.Call1(fnGetCurrentClocksEventReasons, d.frame().Out())
}

func (d tableDevice) powerLimit() (uint32, Return) {
	return d.value(fnGetPowerManagementLimit, d.frame())
}

func (d tableDevice) defaultPowerLimit() (uint32, Return) {
	return d.value(fnGetPowerManagementDefaultLimit, d.frame())
}

func (d tableDevice) pcieReplays() (uint32, Return) {
	return d.value(fnGetPcieReplayCounter, d.frame())
}

func (d tableDevice) nvLinkErrors(link int, counter uint32) (uint64, Return) {
	return d.t.Call1(fnGetNvLinkErrorCounter, d.frame().In(uintptr(link), uintptr(counter)).Out())
}

func (d tableDevice) field(id, scope uint32) (fieldValue, Return) {
	v := &struct { // nvmlFieldValue_t
		id, scope          uint32
		timestamp, latency int64
		kind               uint32
		result             int32
		bytes              [8]byte
	}{id: id, scope: scope}
	r := d.t.Call(fnGetFieldValues, d.frame().In(1).Ptr(unsafe.Pointer(v)))
	return fieldValue{v.kind, Return(v.result), v.bytes}, r
}

func (d tableDevice) fabric() (Fabric, Return) {
	v := new(struct { // nvmlGpuFabricInfo_v2_t
		version        uint32
		cluster        [16]byte
		status, clique uint32
		state          uint8
		health         uint32
	})
	v.version = uint32(unsafe.Sizeof(*v)) | 2<<24 // NVML_STRUCT_VERSION
	r := d.t.Call(fnGetGpuFabricInfoV, d.frame().Ptr(unsafe.Pointer(v)))
	return Fabric{FabricState(v.state), int(v.status), v.health}, r
}
