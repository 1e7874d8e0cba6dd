package cufileapi

import "github.com/gochorus/chorus/internal/cudadrv"

// Handles as cuFile gives them out.
type (
	Handle uintptr // CUfileHandle_t, a registered file
	Batch  uintptr // CUfileBatchHandle_t
)

// API is every function of cuFile 1.15. Device memory is given by its address; sizes and
// offsets are in bytes unless a name says KB.
type API interface {
	Has(f Func) bool // whether the loaded library has the function

	GetVersion() (int32, Result) // 1000·major + 10·minor: 1150 is 1.15

	// The driver is reference-counted by DriverOpen and DriverClose; UseCount returns the
	// count. Registering a file or a buffer opens the driver if it is closed.
	DriverOpen() Result
	DriverClose() Result // cuFileDriverClose_v2
	UseCount() int64
	DriverGetProperties(p *DrvProps) Result
	DriverSetPollMode(poll bool, thresholdKB uintptr) Result
	DriverSetMaxDirectIOSize(kb uintptr) Result
	DriverSetMaxCacheSize(kb uintptr) Result
	DriverSetMaxPinnedMemSize(kb uintptr) Result
	GetBARSizeInKB(gpu int32) (uintptr, Result)

	// A file descriptor is registered by its number, once. It must stay open until
	// HandleDeregister, which must not be called while the handle is in use.
	HandleRegister(d *Descr) (Handle, Result)
	HandleDeregister(h Handle)
	// Registering memory is optional. Registered memory must be deregistered before it is
	// freed.
	BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) Result
	BufDeregister(p cudadrv.DevicePtr) Result

	// Read and Write return when the bytes have arrived. They are not ordered with any
	// stream: the caller must have waited for other uses of the memory. For registered
	// memory, base is the registered address. A transfer that ends early, for example at
	// the end of the file, is not an error. The error is a syscall.Errno or a Result.
	Read(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error)
	Write(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error)

	// A batch holds up to nr transfers. The params of a submission must stay reachable and
	// unchanged, and must not be on a stack, until BatchIOGetStatus has reported each of
	// its transfers. BatchIOGetStatus waits until minNr transfers have completed or the
	// timeout has passed; nil means no timeout. It stores an event for each completed
	// transfer until events is full, and returns their number.
	BatchIOSetUp(nr uint32) (Batch, Result)
	BatchIOSubmit(b Batch, params []IOParams, flags uint32) Result
	BatchIOGetStatus(b Batch, minNr uint32, events []IOEvents, timeout *Timespec) (uint32, Result)
	BatchIOCancel(b Batch) Result
	BatchIODestroy(b Batch)

	// ReadAsync and WriteAsync enqueue a transfer. C keeps the four addresses. It reads
	// size and the offsets when the stream reaches the transfer, unless StreamRegister
	// declared them as fixed. It writes done, which Transferred decodes, when the
	// transfer has ended. So they must be page-locked memory (cuMemHostAlloc), never
	// Go's, and live until what follows on the stream has completed. Memory that is not
	// registered is taken to have as many bytes as size says at the call, so that with an
	// offset in it nothing is transferred and done is -5. On stream 0 the call returns
	// when the transfer is over. Streams that are captured refuse both.
	ReadAsync(h Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) Result
	WriteAsync(h Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) Result
	StreamRegister(s cudadrv.Stream, flags uint32) Result // waits for the stream
	StreamDeregister(s cudadrv.Stream) Result             // waits for the stream

	// Parameters are set while the driver is closed and take effect when it is opened
	// next. Before that the getters return the values set, afterwards the values in
	// effect.
	SetParameterSizeT(p SizeTParam, v uintptr) Result
	SetParameterBool(p BoolParam, v bool) Result
	SetParameterString(p StringParam, v string) Result
	GetParameterSizeT(p SizeTParam) (uintptr, Result)
	GetParameterBool(p BoolParam) (bool, Result)
	GetParameterString(p StringParam) (string, Result)
	GetParameterMinMaxValue(p SizeTParam) (least, greatest uintptr, r Result)
	// The pool of host memory of the compatibility mode: slabs of each size.
	SetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) Result // equally many
	GetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) Result // as many as there are

	// Statistics are collected between StatsStart and StatsStop, to the level: 1 has
	// counts, 2 also histograms of sizes, 3 also each GPU's. GetStatsL2 wants level 2
	// or above, and so on.
	SetStatsLevel(level int32) Result
	GetStatsLevel() (int32, Result)
	StatsStart() Result
	StatsStop() Result
	StatsReset() Result
	GetStatsL1(s *StatsLevel1) Result
	GetStatsL2(s *StatsLevel2) Result
	GetStatsL3(s *StatsLevel3) Result
}
