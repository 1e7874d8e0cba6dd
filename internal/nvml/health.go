package nvml

import (
	"bytes"
	"encoding/binary"
	"math"
)

// Health reads the settings and the error counters of one GPU. If the GPU or the driver does
// not have a value, the method returns an *UnsupportedError.
type Health interface {
	Name() (string, error)
	PCIBusID() (string, error)                            // as in sysfs, such as 0000:06:00.0
	Persistence() (on bool, err error)                    // whether the driver keeps the GPU initialized
	ComputeMode() (ComputeMode, error)                    // the number of processes that the GPU admits
	MIGMode() (current, pending bool, err error)          // pending is the mode after the next reset
	ECCMode() (current, pending bool, err error)          // pending is the mode after the next reset
	ECCErrors(uncorrected, lifetime bool) (uint64, error) // since the driver was loaded, or in the GPU's lifetime
	CorrectedErrors(m Memory) (uint64, error)             // since the driver was loaded
	RemappedRows() (*RemappedRows, error)                 // rows of memory that spare rows replace
	ClockEvents() (ClockEvents, error)                    // the reasons for the current clocks
	PowerLimit() (milliwatts int, err error)
	DefaultPowerLimit() (milliwatts int, err error)
	PCIeReplays() (int, error) // since the driver was loaded
	NVLinkErrors(link int, c LinkCounter) (uint64, error)
	NVLinkSpeed(link int) (megabytesPerSecond int, err error)
	NVLinkSent() (bytes uint64, err error) // over all links, since the driver was loaded
	RecoveryAction() (RecoveryAction, error)
	Fabric() (*Fabric, error) // state of the registration with the fabric manager
}

// HealthOf returns the settings and the error counters of a GPU. Virtual devices have none.
func HealthOf(d Device) (Health, error) {
	if h, ok := d.(Health); ok {
		return h, nil
	}
	return nil, &UnsupportedError{Need: "a GPU", Have: "virtual devices"}
}

// A ComputeMode is an nvmlComputeMode_t.
type ComputeMode int

// The compute modes. Mode 1 is obsolete.
const (
	ModeDefault    ComputeMode = 0 // any number of processes
	ModeProhibited ComputeMode = 2
	ModeExclusive  ComputeMode = 3 // one process
)

// A Memory is an nvmlMemoryLocation_t.
type Memory int

// The memories that Chorus distinguishes.
const (
	DRAM Memory = 2
	SRAM Memory = 7
)

// RemappedRows holds the result of nvmlDeviceGetRemappedRows.
type RemappedRows struct {
	Correctable, Uncorrectable int  // rows that were remapped because of such errors
	Pending                    bool // a remapping waits for a reset
	Failed                     bool // a remapping failed
}

// ClockEvents is a set of nvmlClocksEventReasons.
type ClockEvents uint64

// The reasons that Chorus distinguishes.
const (
	ApplicationClocks ClockEvents = 0x2
	HWSlowdown        ClockEvents = 0x8
	SyncBoost         ClockEvents = 0x10
	SWThermal         ClockEvents = 0x20
	HWThermal         ClockEvents = 0x40
	PowerBrake        ClockEvents = 0x80
)

// A LinkCounter is an nvmlNvLinkErrorCounter_t.
type LinkCounter int

// The counters of errors of an NVLink.
const (
	LinkReplays    LinkCounter = 0
	LinkRecoveries LinkCounter = 1
	LinkCRC        LinkCounter = 2 // of flow control digits
)

// A RecoveryAction is an nvmlDeviceGpuRecoveryAction_t.
type RecoveryAction int

// The actions that the driver asks for.
const (
	RecoverNone     RecoveryAction = 0
	RecoverReset    RecoveryAction = 1
	RecoverReboot   RecoveryAction = 2
	RecoverDrainP2P RecoveryAction = 3
	RecoverDrain    RecoveryAction = 4 // drain and reset
	RecoverIMEX     RecoveryAction = 5
)

// A Fabric holds the result of nvmlDeviceGetGpuFabricInfoV.
type Fabric struct {
	State  FabricState
	Status int    // nvmlReturn_t of the registration
	Health uint32 // nvmlGpuFabricInfo_v2_t.healthMask
}

// DegradedBandwidth reports whether the fabric runs with less bandwidth.
func (f *Fabric) DegradedBandwidth() bool { return f.Health&3 == 1 }

// Misconfigured reports whether the health mask names a wrong configuration.
func (f *Fabric) Misconfigured() bool { return f.Health>>8&0xf > 1 }

// A FabricState is an nvmlGpuFabricState_t.
type FabricState int

// The states of a registration with the fabric manager.
const (
	FabricNotSupported FabricState = 0
	FabricNotStarted   FabricState = 1
	FabricInProgress   FabricState = 2
	FabricCompleted    FabricState = 3
)

// Fields of nvmlDeviceGetFieldValues.
const (
	fieldNVLinkSent     = 138 // NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX in KiB, with the link as the scope
	fieldNVLinkSpeed    = 164 // NVML_FI_DEV_NVLINK_GET_SPEED, with the link as the scope
	fieldRecoveryAction = 230 // NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
)

func (d device) Name() (string, error) {
	v, r := d.raw.name()
	return v, d.lib.fail("nvmlDeviceGetName", r)
}

// PCIBusID shortens the domain, which NVML writes with 8 digits and sysfs with 4.
func (d device) PCIBusID() (string, error) {
	v, r := d.raw.pciBusID()
	if id := bytes.ToLower([]byte(v)); len(id) == len("00000000:06:00.0") && bytes.HasPrefix(id, []byte("0000")) {
		v = string(id[4:])
	}
	return v, d.lib.fail("nvmlDeviceGetPciInfo_v3", r)
}

func (d device) Persistence() (bool, error) {
	v, r := d.raw.persistence()
	return v != 0, d.lib.fail("nvmlDeviceGetPersistenceMode", r)
}

func (d device) ComputeMode() (ComputeMode, error) {
	v, r := d.raw.computeMode()
	return ComputeMode(v), d.lib.fail("nvmlDeviceGetComputeMode", r)
}

func (d device) MIGMode() (current, pending bool, err error) {
	c, p, r := d.raw.migMode()
	return c != 0, p != 0, d.lib.fail("nvmlDeviceGetMigMode", r)
}

func (d device) ECCMode() (current, pending bool, err error) {
	c, p, r := d.raw.eccMode()
	return c != 0, p != 0, d.lib.fail("nvmlDeviceGetEccMode", r)
}

func (d device) ECCErrors(uncorrected, lifetime bool) (uint64, error) {
	v, r := d.raw.totalECC(number(uncorrected), number(lifetime))
	return v, d.lib.fail("nvmlDeviceGetTotalEccErrors", r)
}

// number returns 1 for true.
func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

func (d device) CorrectedErrors(m Memory) (uint64, error) {
	const corrected, volatile = 0, 0
	v, r := d.raw.memoryErrors(corrected, volatile, uint32(m))
	return v, d.lib.fail("nvmlDeviceGetMemoryErrorCounter", r)
}

func (d device) RemappedRows() (*RemappedRows, error) {
	v, r := d.raw.remappedRows()
	return &v, d.lib.fail("nvmlDeviceGetRemappedRows", r)
}

func (d device) ClockEvents() (ClockEvents, error) {
	v, r := d.raw.clockEvents()
	return ClockEvents(v), d.lib.fail("nvmlDeviceGetCurrentClocksEventReasons", r)
}

func (d device) PowerLimit() (int, error) {
	v, r := d.raw.powerLimit()
	return int(v), d.lib.fail("nvmlDeviceGetPowerManagementLimit", r)
}

func (d device) DefaultPowerLimit() (int, error) {
	v, r := d.raw.defaultPowerLimit()
	return int(v), d.lib.fail("nvmlDeviceGetPowerManagementDefaultLimit", r)
}

func (d device) PCIeReplays() (int, error) {
	v, r := d.raw.pcieReplays()
	return int(v), d.lib.fail("nvmlDeviceGetPcieReplayCounter", r)
}

func (d device) NVLinkErrors(link int, c LinkCounter) (uint64, error) {
	v, r := d.raw.nvLinkErrors(link, uint32(c))
	return v, d.lib.fail("nvmlDeviceGetNvLinkErrorCounter", r)
}

func (d device) NVLinkSpeed(link int) (int, error) {
	v, err := d.field(fieldNVLinkSpeed, uint32(link))
	return int(v), err
}

func (d device) NVLinkSent() (uint64, error) {
	const allLinks = math.MaxUint32
	v, err := d.field(fieldNVLinkSent, allLinks)
	return v << 10, err
}

func (d device) RecoveryAction() (RecoveryAction, error) {
	v, err := d.field(fieldRecoveryAction, 0)
	return RecoveryAction(v), err
}

// field reads one value of nvmlDeviceGetFieldValues. The value has a separate result.
func (d device) field(id, scope uint32) (uint64, error) {
	const op = "nvmlDeviceGetFieldValues"
	v, r := d.raw.field(id, scope)
	if r == success {
		r = v.result
	}
	if r != success {
		return 0, d.lib.fail(op, r)
	}
	return v.number(), nil
}

func (d device) Fabric() (*Fabric, error) {
	v, r := d.raw.fabric()
	return &v, d.lib.fail("nvmlDeviceGetGpuFabricInfoV", r)
}

// A fieldValue is the part of an nvmlFieldValue_t that Chorus reads.
type fieldValue struct {
	kind   uint32 // nvmlValueType_t
	result Return
	bytes  [8]byte
}

// number converts the value of a union to a number that is not negative.
func (v fieldValue) number() uint64 {
	switch v.kind {
	case 0: // NVML_VALUE_TYPE_DOUBLE
		return uint64(max(math.Float64frombits(binary.NativeEndian.Uint64(v.bytes[:])), 0))
	case 1, 5: // NVML_VALUE_TYPE_UNSIGNED_INT, NVML_VALUE_TYPE_SIGNED_INT
		return uint64(binary.NativeEndian.Uint32(v.bytes[:]))
	case 6: // NVML_VALUE_TYPE_UNSIGNED_SHORT
		return uint64(binary.NativeEndian.Uint16(v.bytes[:]))
	}
	return binary.NativeEndian.Uint64(v.bytes[:])
}
