package ncclapi

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// DType is ncclDataType_t.
type DType int32

// The element types, with the values of nccl.h.
const (
	Int8 DType = iota
	Uint8
	Int32
	Uint32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16
	Float8E4M3
	Float8E5M2
)

// Size is the width of one element in bytes, or 0 for an unknown type.
func (t DType) Size() uintptr {
	switch t {
	case Int8, Uint8, Float8E4M3, Float8E5M2:
		return 1
	case Float16, BFloat16:
		return 2
	case Int32, Uint32, Float32:
		return 4
	case Int64, Uint64, Float64:
		return 8
	}
	return 0
}

// RedOp is ncclRedOp_t. Values of 5 and above are made by RedOpCreatePreMulSum.
type RedOp int32

// The reductions, with the values of nccl.h.
const (
	Sum RedOp = iota
	Prod
	Max
	Min
	Avg
)

// The location of the scalar of RedOpCreatePreMulSum.
const (
	ScalarDevice        int32 = 0
	ScalarHostImmediate int32 = 1
)

// Flags of CommShrink and CommWindowRegister.
const (
	ShrinkDefault        int32 = 0
	ShrinkAbort          int32 = 1
	WindowDefault        int32 = 0
	WindowCollSymmetric  int32 = 1
	WindowStrictOrdering int32 = 2
	WindowGINOnly        int32 = 4 // 2.32
)

// Undefined is NCCL_CONFIG_UNDEF_INT: the library chooses.
const Undefined = math.MinInt32

// ConfigMagic is the Magic of a Config that Stamp has filled in, and of the other structs that
// describe a choice.
const ConfigMagic = 0xcafebeef

const simInfoMagic = 0x74685283

// Config is ncclConfig_t in its newest known layout. New versions only append fields;
// Stamp sets how many bytes the loaded library reads.
type Config struct {
	Size                uintptr
	Magic               uint32
	Version             uint32
	Blocking            int32
	CGAClusterSize      int32
	MinCTAs             int32
	MaxCTAs             int32
	NetName             *byte
	SplitShare          int32
	TrafficClass        int32
	CommName            *byte
	CollnetEnable       int32
	CTAPolicy           int32
	ShrinkShare         int32
	NVLSCTAs            int32
	NChannelsPerNetPeer int32
	NVLinkCentricSched  int32
	GraphUsageMode      int32 // 2.29
	NumRMACtx           int32 // 2.29
	MaxP2PPeers         int32 // 2.30
	GraphStreamOrdering int32 // 2.30
	LaunchOrderImplicit int32 // 2.31
	NumRMASig           int32 // 2.31
	RMAEagerInit        int32 // 2.31
	HostCFTMode         int32 // 2.31
	NVLSHostMode        int32 // 2.32
	_                   uint32
}

// What CommMemStats tells, with the values of nccl.h.
const (
	StatGPUMemSuspend   int32 = 0 // bytes that CommSuspend gives back
	StatGPUMemSuspended int32 = 1 // 1 while they are given back
	StatGPUMemPersist   int32 = 2 // bytes that stay
	StatGPUMemTotal     int32 = 3
)

// Flags of CommRevoke and CommSuspend.
const (
	RevokeDefault int32 = 0
	SuspendMem    int32 = 1
)

// Properties is ncclCommProperties_t of 2.30; Stamp sets how many bytes the loaded library
// reads.
type Properties struct {
	Size             uintptr
	Magic            uint32
	Version          uint32
	Rank             int32
	NRanks           int32
	CUDADev          int32
	NVMLDev          int32
	DeviceAPISupport uint8
	MultimemSupport  uint8
	_                [2]uint8
	GINType          int32
	NLSATeams        int32
	HostRMASupport   uint8
	_                [3]uint8
	RailedGINType    int32
	_                uint32
}

// Param is an ncclParamHandle_t.
type Param uintptr

// SignalDesc is ncclWaitSignalDesc_t.
type SignalDesc struct {
	Ops    int32 // how many signals to wait for
	Peer   int32
	Signal int32
	Ctx    int32
}

// SimInfo is ncclSimInfo_t.
type SimInfo struct {
	Size          uintptr
	Magic         uint32
	Version       uint32
	EstimatedTime float32 // microseconds as NCCL's cost model has it; -1 when unknown
	_             uint32
}

// newestKnown is the NCCL whose ncclConfig_t and ncclCollConfig_t Config and CollConfig have.
// A newer library is told this version, and leaves the fields that came later at their
// defaults.
const newestKnown = 23203

// newestProperties is the NCCL whose ncclCommProperties_t Properties has. A newer library must
// be told this version: it would write fields behind the end of the struct.
const newestProperties = 23007

// configSizes has sizeof(ncclConfig_t) from each version that changed it. The
// fields in between filled padding.
var configSizes = []struct {
	since int32
	size  uintptr
}{
	{23203, 120},
	{23102, 112},
	{23003, 96},
	{22902, 88},
	{22803, 80},
	{22703, 72},
	{0, 48}, // 2.17 to 2.26
}

// NewConfig returns a Config that leaves every choice to the library, for a library of the
// given version.
func NewConfig(version int32) *Config {
	c := &Config{
		Blocking: Undefined, CGAClusterSize: Undefined, MinCTAs: Undefined, MaxCTAs: Undefined,
		SplitShare: Undefined, TrafficClass: Undefined, CollnetEnable: Undefined, CTAPolicy: Undefined,
		ShrinkShare: Undefined, NVLSCTAs: Undefined, NChannelsPerNetPeer: Undefined, NVLinkCentricSched: Undefined,
		GraphUsageMode: Undefined, NumRMACtx: Undefined, MaxP2PPeers: Undefined, GraphStreamOrdering: Undefined,
		LaunchOrderImplicit: Undefined, NumRMASig: Undefined, RMAEagerInit: Undefined, HostCFTMode: Undefined, NVLSHostMode: Undefined,
	}
	c.Stamp(version)
	return c
}

// Stamp sets the fields that tell the loaded library how to read the Config. A library
// does not notice a struct that is newer than itself, and ignores the rest, so the stamp
// must have the library's version and not a header's.
func (c *Config) Stamp(version int32) {
	c.Magic, c.Version = ConfigMagic, uint32(min(version, newestKnown))
	for _, s := range configSizes {
		if version >= s.since {
			c.Size = s.size
			break
		}
	}
}

// TooNew returns the C name of the first field that is set although a library
// of the given version does not know it, and the version that brought it; ""
// means that there is none.
func (c *Config) TooNew(version int32) (field string, since int32) {
	for _, f := range []struct {
		name  string
		since int32
		set   bool
	}{
		{"trafficClass", 22602, c.TrafficClass != Undefined},
		{"commName", 22703, c.CommName != nil},
		{"collnetEnable", 22703, c.CollnetEnable != Undefined},
		{"CTAPolicy", 22703, c.CTAPolicy != Undefined},
		{"shrinkShare", 22703, c.ShrinkShare != Undefined},
		{"nvlsCTAs", 22703, c.NVLSCTAs != Undefined},
		{"nChannelsPerNetPeer", 22803, c.NChannelsPerNetPeer != Undefined},
		{"nvlinkCentricSched", 22803, c.NVLinkCentricSched != Undefined},
		{"graphUsageMode", 22902, c.GraphUsageMode != Undefined},
		{"numRmaCtx", 22902, c.NumRMACtx != Undefined},
		{"maxP2pPeers", 23003, c.MaxP2PPeers != Undefined},
		{"graphStreamOrdering", 23007, c.GraphStreamOrdering != Undefined},
		{"launchOrderImplicit", 23102, c.LaunchOrderImplicit != Undefined},
		{"numRmaSig", 23102, c.NumRMASig != Undefined},
		{"rmaEagerInit", 23102, c.RMAEagerInit != Undefined},
		{"hostCftMode", 23102, c.HostCFTMode != Undefined},
		{"nvlsHostMode", 23203, c.NVLSHostMode != Undefined},
	} {
		if f.set && version < f.since {
			return f.name, f.since
		}
	}
	return "", 0
}

// propertiesSizes has sizeof(ncclCommProperties_t) from each version that changed it. NCCL
// 2.29.2 has ginType as a byte in the padding before GINType.
var propertiesSizes = []struct {
	since int32
	size  uintptr
}{
	{23003, unsafe.Sizeof(Properties{})},
	{22907, unsafe.Offsetof(Properties{}.RailedGINType)},
	{0, unsafe.Offsetof(Properties{}.NLSATeams)},
}

// NewProperties returns Properties for a library of the given version to fill in.
func NewProperties(version int32) *Properties {
	p := &Properties{Magic: ConfigMagic, Version: uint32(min(version, newestProperties))}
	for _, s := range propertiesSizes {
		if version >= s.since {
			p.Size = s.size
			break
		}
	}
	return p
}

// NewSimInfo returns a SimInfo for a library of the given version.
func NewSimInfo(version int32) *SimInfo {
	s := &SimInfo{EstimatedTime: -1}
	s.Stamp(version)
	return s
}

// Stamp fills in what tells the loaded library how to read the SimInfo.
func (s *SimInfo) Stamp(version int32) {
	s.Size, s.Magic, s.Version = unsafe.Sizeof(*s), simInfoMagic, uint32(min(version, newestKnown))
}

// CollConfig is ncclCollConfig_t: the configuration of one collective, in its newest known
// layout. Stamp sets how many bytes the loaded library reads.
type CollConfig struct {
	Size                  uintptr
	Magic                 uint32
	Version               uint32
	Ext                   uintptr // options of other vendors' libraries, which Chorus does not use
	MinCTAs               int32
	MaxCTAs               int32
	NVLSCTAs              int32
	CGAClusterSize        int32
	AlgSelection          *byte // nil means automatic
	ForceAlgSelection     int32 // 1: a selection that NCCL cannot honour is an error
	CTAPolicy             int32
	UserProfilerTag       uint64  // the highest bit is NCCL's
	LaunchCompletionEvent uintptr // a CUevent; 2.32
}

// NewCollConfig returns a CollConfig that leaves every choice to the library, for a library of
// the given version.
func NewCollConfig(version int32) *CollConfig {
	c := &CollConfig{
		MinCTAs: Undefined, MaxCTAs: Undefined, NVLSCTAs: Undefined, CGAClusterSize: Undefined,
		ForceAlgSelection: 1, CTAPolicy: Undefined,
	}
	c.Stamp(version)
	return c
}

// Stamp sets the fields that tell the loaded library how to read the CollConfig.
func (c *CollConfig) Stamp(version int32) {
	c.Magic, c.Version, c.Size = ConfigMagic, uint32(min(version, newestKnown)), unsafe.Sizeof(*c)
	if version < sinceLaunchEvent {
		c.Size = unsafe.Offsetof(c.LaunchCompletionEvent)
	}
}

// sinceLaunchEvent is the first NCCL whose ncclCollConfig_t has launchCompletionEvent.
const sinceLaunchEvent = 23203

// TooNew is as of Config.
func (c *CollConfig) TooNew(version int32) (field string, since int32) {
	if c.LaunchCompletionEvent != 0 && version < sinceLaunchEvent {
		return "launchCompletionEvent", sinceLaunchEvent
	}
	return "", 0
}

const hostIDName = "NCCL_HOSTID"

// HostID returns NCCL's name for the host of this process, or "" if NCCL chooses it:
// NCCL_HOSTID, or a name of this process alone if CHORUS_SHARE_GPUS is yes. NCCL refuses two
// ranks of one host on one GPU, and connects ranks of two hosts over the network.
func HostID() string {
	if id := os.Getenv(hostIDName); id != "" || !SharesGPUs() {
		return id
	}
	return ownHost()
}

// SharesGPUs reports whether CHORUS_SHARE_GPUS permits several processes on one GPU.
func SharesGPUs() bool { return env.ShareGPUs.Value() == "yes" }

var ownHost = sync.OnceValue(func() string {
	host, _ := os.Hostname() // the rest of the name is sufficient
	return fmt.Sprintf("chorus-%s-%d-%x", host, os.Getpid(), time.Now().UnixNano())
})

// libc has setenv: os.Setenv does not change the environment of C in a build without cgo.
var libc = &dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}}

// setHostID passes HostID to NCCL. NCCL reads it once, when the first communicator is made.
func setHostID() error {
	if _, err := env.ShareGPUs.OneOf("yes", "no"); err != nil {
		return err
	}
	if !SharesGPUs() || os.Getenv(hostIDName) != "" {
		return nil
	}
	so, err := dl.Open(libc)
	if err != nil {
		return fmt.Errorf("nccl: set %s for %s: %w", hostIDName, env.ShareGPUs.Name, err)
	}
	setenv, ok := so.Symbol("setenv")
	if !ok {
		return fmt.Errorf("nccl: set %s for %s: %s has no setenv", hostIDName, env.ShareGPUs.Name, so.Path())
	}
	if dl.Get().String(hostIDName).String(HostID()).In(1).Do(setenv) != 0 {
		return errors.New("nccl: the C library could not set " + hostIDName)
	}
	return nil
}
