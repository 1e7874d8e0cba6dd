package ncclapi

import (
	"fmt"
	"maps"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

func findHeader(t *testing.T) *dltest.Header {
	return dltest.FindHeader(t, "nccl.h", "cuda_runtime.h")
}

func TestHeaderResults(t *testing.T) {
	table := map[string]int64{}
	for r, e := range results {
		table[e.name] = int64(r)
	}
	h := findHeader(t)
	table["ncclNumResults"] = h.Enum("ncclNumResults")["ncclNumResults"] // a count, not a result
	h.RequireResults(`ncclSuccess|ncclTimeout|ncclInProgress|ncclNumResults|nccl[A-Za-z]+(?:Error|Argument|Usage)`, table)
}

func TestHeaderPrototypes(t *testing.T) {
	findHeader(t).RequirePrototypes(signatures)
}

func TestHeaderValues(t *testing.T) {
	h := findHeader(t)
	values := map[string]int64{
		"ncclInt8": int64(Int8), "ncclUint8": int64(Uint8), "ncclInt32": int64(Int32), "ncclUint32": int64(Uint32),
		"ncclInt64": int64(Int64), "ncclUint64": int64(Uint64), "ncclFloat16": int64(Float16),
		"ncclFloat32": int64(Float32), "ncclFloat64": int64(Float64), "ncclBfloat16": int64(BFloat16),
		"ncclSum": int64(Sum), "ncclProd": int64(Prod), "ncclMax": int64(Max), "ncclMin": int64(Min), "ncclAvg": int64(Avg),
		"ncclScalarDevice": int64(ScalarDevice), "ncclScalarHostImmediate": int64(ScalarHostImmediate),
		"NCCL_CONFIG_UNDEF_INT":                  Undefined,
		"sizeof(ncclUniqueId)":                   int64(unsafe.Sizeof(UniqueID{})),
		"sizeof(ncclSimInfo_t)":                  int64(unsafe.Sizeof(SimInfo{})),
		"offsetof(ncclSimInfo_t, magic)":         int64(unsafe.Offsetof(SimInfo{}.Magic)),
		"offsetof(ncclSimInfo_t, version)":       int64(unsafe.Offsetof(SimInfo{}.Version)),
		"offsetof(ncclSimInfo_t, estimatedTime)": int64(unsafe.Offsetof(SimInfo{}.EstimatedTime)),
	}
	version := int32(0)
	for _, part := range []struct {
		name   string
		factor int32
	}{{"NCCL_MAJOR", 10000}, {"NCCL_MINOR", 100}, {"NCCL_PATCH", 1}} {
		version += int32(h.Enum(part.name)[part.name]) * part.factor
	}
	t.Logf("nccl.h %s", VersionText(version))
	if version >= 22403 {
		maps.Copy(values, map[string]int64{"ncclFloat8e4m3": int64(Float8E4M3), "ncclFloat8e5m2": int64(Float8E5M2)})
	}
	if version >= 22703 {
		maps.Copy(values, map[string]int64{
			"NCCL_SHRINK_DEFAULT": int64(ShrinkDefault), "NCCL_SHRINK_ABORT": int64(ShrinkAbort),
			"NCCL_WIN_DEFAULT": int64(WindowDefault), "NCCL_WIN_COLL_SYMMETRIC": int64(WindowCollSymmetric),
		})
	}
	if version <= newestKnown {
		values["sizeof(ncclConfig_t)"] = int64(NewConfig(version).Size)
	}
	var c Config
	for _, f := range []struct {
		name   string
		since  int32
		offset uintptr
	}{
		{"size", 0, unsafe.Offsetof(c.Size)}, {"magic", 0, unsafe.Offsetof(c.Magic)},
		{"version", 0, unsafe.Offsetof(c.Version)}, {"blocking", 0, unsafe.Offsetof(c.Blocking)},
		{"cgaClusterSize", 0, unsafe.Offsetof(c.CGAClusterSize)},
		{"minCTAs", 0, unsafe.Offsetof(c.MinCTAs)}, {"maxCTAs", 0, unsafe.Offsetof(c.MaxCTAs)},
		{"netName", 0, unsafe.Offsetof(c.NetName)}, {"splitShare", 0, unsafe.Offsetof(c.SplitShare)},
		{"trafficClass", 22602, unsafe.Offsetof(c.TrafficClass)},
		{"commName", 22703, unsafe.Offsetof(c.CommName)}, {"collnetEnable", 22703, unsafe.Offsetof(c.CollnetEnable)},
		{"CTAPolicy", 22703, unsafe.Offsetof(c.CTAPolicy)}, {"shrinkShare", 22703, unsafe.Offsetof(c.ShrinkShare)},
		{"nvlsCTAs", 22703, unsafe.Offsetof(c.NVLSCTAs)},
		{"nChannelsPerNetPeer", 22803, unsafe.Offsetof(c.NChannelsPerNetPeer)},
		{"nvlinkCentricSched", 22803, unsafe.Offsetof(c.NVLinkCentricSched)},
		{"graphUsageMode", 22902, unsafe.Offsetof(c.GraphUsageMode)}, {"numRmaCtx", 22902, unsafe.Offsetof(c.NumRMACtx)},
		{"maxP2pPeers", 23003, unsafe.Offsetof(c.MaxP2PPeers)},
		{"graphStreamOrdering", 23007, unsafe.Offsetof(c.GraphStreamOrdering)},
		{"launchOrderImplicit", 23102, unsafe.Offsetof(c.LaunchOrderImplicit)},
		{"numRmaSig", 23102, unsafe.Offsetof(c.NumRMASig)}, {"rmaEagerInit", 23102, unsafe.Offsetof(c.RMAEagerInit)},
		{"hostCftMode", 23102, unsafe.Offsetof(c.HostCFTMode)}, {"nvlsHostMode", 23203, unsafe.Offsetof(c.NVLSHostMode)},
	} {
		if version >= f.since {
			values[fmt.Sprintf("offsetof(ncclConfig_t, %s)", f.name)] = int64(f.offset)
		}
	}
	maps.Copy(values, collConfigValues(version))
	h.RequireValues(values)
}

// collConfigValues has the layout of the structs that came with NCCL 2.31 and 2.32.
func collConfigValues(version int32) map[string]int64 {
	values := map[string]int64{}
	if version < 23102 {
		return values
	}
	if version <= newestKnown {
		values["sizeof(ncclCollConfig_t)"] = int64(NewCollConfig(version).Size)
	}
	var c CollConfig
	for name, offset := range map[string]uintptr{
		"size": unsafe.Offsetof(c.Size), "magic": unsafe.Offsetof(c.Magic), "version": unsafe.Offsetof(c.Version),
		"ext": unsafe.Offsetof(c.Ext), "minCTAs": unsafe.Offsetof(c.MinCTAs), "maxCTAs": unsafe.Offsetof(c.MaxCTAs),
		"nvlsCTAs": unsafe.Offsetof(c.NVLSCTAs), "cgaClusterSize": unsafe.Offsetof(c.CGAClusterSize),
		"algSelection": unsafe.Offsetof(c.AlgSelection), "forceAlgSelection": unsafe.Offsetof(c.ForceAlgSelection),
		"CTAPolicy": unsafe.Offsetof(c.CTAPolicy), "userProfilerTag": unsafe.Offsetof(c.UserProfilerTag),
	} {
		values[fmt.Sprintf("offsetof(ncclCollConfig_t, %s)", name)] = int64(offset)
	}
	values["NCCL_WIN_STRICT_ORDERING"] = int64(WindowStrictOrdering)
	if version < 23203 {
		return values
	}
	var e EncryptionConfig
	maps.Copy(values, map[string]int64{
		"NCCL_WIN_GIN_ONLY": int64(WindowGINOnly),
		"offsetof(ncclCollConfig_t, launchCompletionEvent)": int64(unsafe.Offsetof(c.LaunchCompletionEvent)),
		"sizeof(ncclEncryptionConfig_t)":                    int64(unsafe.Sizeof(e)),
		"offsetof(ncclEncryptionConfig_t, mode)":            int64(unsafe.Offsetof(e.Mode)),
		"offsetof(ncclEncryptionConfig_t, psk)":             int64(unsafe.Offsetof(e.PSK)),
		"NCCL_ENCRYPTION_MODE_NONE":                         int64(EncryptionNone),
		"NCCL_ENCRYPTION_MODE_PSK":                          int64(EncryptionPSK),
	})
	return values
}
