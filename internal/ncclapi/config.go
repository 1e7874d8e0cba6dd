package ncclapi

import "unsafe"

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
