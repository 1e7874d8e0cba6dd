package cufileapi

// OpCounter is CUfileOpCounter_t.
type OpCounter struct{ OK, Err uint64 }

// StatsLevel1 is CUfileStatsLevel1_t. Times are in microseconds.
type StatsLevel1 struct {
	ReadOps             OpCounter
	WriteOps            OpCounter
	HandleRegisterOps   OpCounter
	HandleDeregisterOps OpCounter
	BufRegisterOps      OpCounter
	BufDeregisterOps    OpCounter

	ReadBytes             uint64
	WriteBytes            uint64
	ReadBytesPerSecond    uint64
	WriteBytesPerSecond   uint64
	ReadLatencyAverage    uint64
	WriteLatencyAverage   uint64
	ReadOpsPerSecond      uint64
	WriteOpsPerSecond     uint64
	ReadLatencySum        uint64
	WriteLatencySum       uint64
	BatchSubmitOps        OpCounter
	BatchCompleteOps      OpCounter
	BatchSetUpOps         OpCounter
	BatchCancelOps        OpCounter
	BatchDestroyOps       OpCounter
	BatchEnqueuedOps      OpCounter
	BatchPosixEnqueued    OpCounter
	BatchProcessedOps     OpCounter
	BatchPosixProcessed   OpCounter
	BatchNvfsSubmitOps    OpCounter
	BatchP2PSubmitOps     OpCounter
	BatchAIOSubmitOps     OpCounter
	BatchIOUringSubmitOps OpCounter
	BatchMixedSubmitOps   OpCounter
	BatchTotalSubmitOps   OpCounter

	BatchReadBytes            uint64
	BatchWriteBytes           uint64
	BatchReadBandwidth        uint64
	BatchWriteBandwidth       uint64
	BatchSubmitLatencyAverage uint64
	BatchCompletionLatencyAvg uint64
	BatchSubmitOpsPerSecond   uint64
	BatchCompleteOpsPerSecond uint64
	BatchSubmitLatencySum     uint64
	BatchCompletionLatencySum uint64
	LastBatchReadBytes        uint64
	LastBatchWriteBytes       uint64
}

// SizeBuckets is how many classes of sizes the histograms have.
const SizeBuckets = 32

// StatsLevel2 is CUfileStatsLevel2_t. The histograms count transfers by their size
// in KB.
type StatsLevel2 struct {
	Basic         StatsLevel1
	ReadSizeHist  [SizeBuckets]uint64
	WriteSizeHist [SizeBuckets]uint64
}

// PerGPUStats is CUfilePerGpuStats_t. Times are in microseconds.
type PerGPUStats struct {
	UUID [16]byte

	ReadBytes          uint64
	ReadBytesPerSecond uint64
	ReadUtilization    uint64 // percent
	ReadDuration       uint64
	Reads              uint64
	P2PReads           uint64
	NvfsReads          uint64
	PosixReads         uint64
	UnalignedReads     uint64
	DynRoutingReads    uint64
	SparseRegions      uint64
	InlineRegions      uint64
	ReadErrors         uint64

	WriteBytes          uint64
	WriteBytesPerSecond uint64
	WriteUtilization    uint64 // percent
	WriteDuration       uint64
	Writes              uint64
	P2PWrites           uint64
	NvfsWrites          uint64
	PosixWrites         uint64
	UnalignedWrites     uint64
	DynRoutingWrites    uint64
	WriteErrors         uint64

	BufRegisters       uint64
	BufRegistersOK     uint64
	BufRegistersFailed uint64
	BufDeregisters     uint64
	RegisteredBytes    uint64
}

// MaxStatsGPUs is how many GPUs the statistics can tell apart.
const MaxStatsGPUs = 16

// StatsLevel3 is CUfileStatsLevel3_t.
type StatsLevel3 struct {
	Detailed StatsLevel2
	NumGPUs  uint32
	_        uint32
	PerGPU   [MaxStatsGPUs]PerGPUStats
}
