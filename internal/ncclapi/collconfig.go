package ncclapi

import "unsafe"

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
