package nvml

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

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
