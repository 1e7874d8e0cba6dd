package cufileapi

// SizeTParam is CUFileSizeTConfigParameter_t.
type SizeTParam int32

// The parameters that are numbers.
const (
	ProfileStats SizeTParam = iota // the level of statistics from the opening on
	MaxIOQueueDepth
	MaxIOThreads // stream-ordered transfers want at least one
	MinIOThresholdSizeKB
	MaxRequestParallelism
	MaxDirectIOSizeKB
	MaxDeviceCacheSizeKB
	PerBufferCacheSizeKB
	MaxDevicePinnedMemSizeKB
	IOBatchSize
	PollThresholdSizeKB
	BatchIOTimeoutMillis
	NumSizeTParams
)

// BoolParam is CUFileBoolConfigParameter_t.
type BoolParam int32

// The parameters that are true or false.
const (
	ParamUsePollMode BoolParam = iota
	ParamAllowCompatMode
	ParamForceCompatMode
	FSMiscAPICheckAggressive
	ParallelIO  // stream-ordered transfers want it
	ProfileNVTX // obsolete
	AllowSystemMemory
	UsePCIP2PDMA
	PreferIOUring
	ForceODirectMode
	SkipTopologyDetection
	StreamMemopsBypass
	NumBoolParams
)

// StringParam is CUFileStringConfigParameter_t.
type StringParam int32

// The parameters that are texts.
const (
	LoggingLevel StringParam = iota // ERROR, WARN, NOTICE, INFO, DEBUG or TRACE
	EnvLogfilePath
	LogDir
	NumStringParams
)
