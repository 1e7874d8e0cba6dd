package cudadrv

// fn numbers the functions of libcuda that Lib calls.
type fn int

const (
	fnInit fn = iota
	fnDriverGetVersion
	fnDeviceGetCount
	fnDeviceGet
	fnDeviceGetName
	fnDeviceGetUUID
	fnDeviceGetAttribute
	fnDeviceTotalMem
	fnDeviceGetPCIBusID
	fnDeviceCanAccessPeer
	fnDeviceGetDefaultMemPool
	fnDevicePrimaryCtxRetain
	fnDevicePrimaryCtxRelease
	fnDeviceGetP2PAttribute
	fnCtxSetCurrent
	fnCtxGetCurrent
	fnCtxSynchronize
	fnCtxGetStreamPriorityRange
	fnCtxEnablePeerAccess
	fnMemGetInfo
	fnMemAlloc
	fnMemFree
	fnMemAllocAsync
	fnMemFreeAsync
	fnMemPoolSetAttribute
	fnMemPoolSetAccess
	fnMemPoolTrimTo
	fnMemHostAlloc
	fnMemFreeHost
	fnMemcpyHtoDAsync
	fnMemcpyDtoHAsync
	fnMemcpyDtoDAsync
	fnMemcpyPeerAsync
	fnMemsetD8Async
	fnStreamCreateWithPriority
	fnStreamDestroy
	fnStreamSynchronize
	fnStreamQuery
	fnStreamWaitEvent
	fnEventCreate
	fnEventDestroy
	fnEventRecord
	fnEventQuery
	fnEventSynchronize
	fnEventElapsedTime
	fnModuleLoadData
	fnModuleUnload
	fnModuleGetFunction
	fnLaunchKernel
	numFns
)

// symbols has the exported name of each function. cuda.h maps most names to
// the newest of several versions; what is written here is the version whose
// prototype the method has, whatever the header of the day would choose. An
// optional function may be missing: its method returns ErrorNotSupported.
var symbols = [numFns]struct {
	name     string
	optional bool
}{
	fnInit:                      {name: "cuInit"},
	fnDriverGetVersion:          {name: "cuDriverGetVersion"},
	fnDeviceGetCount:            {name: "cuDeviceGetCount"},
	fnDeviceGet:                 {name: "cuDeviceGet"},
	fnDeviceGetName:             {name: "cuDeviceGetName"},
	fnDeviceGetUUID:             {name: "cuDeviceGetUuid_v2"}, // with MIG, the instance's own
	fnDeviceGetAttribute:        {name: "cuDeviceGetAttribute"},
	fnDeviceTotalMem:            {name: "cuDeviceTotalMem_v2"},
	fnDeviceGetPCIBusID:         {name: "cuDeviceGetPCIBusId"},
	fnDeviceCanAccessPeer:       {name: "cuDeviceCanAccessPeer"},
	fnDeviceGetDefaultMemPool:   {name: "cuDeviceGetDefaultMemPool", optional: true},
	fnDevicePrimaryCtxRetain:    {name: "cuDevicePrimaryCtxRetain"},
	fnDevicePrimaryCtxRelease:   {name: "cuDevicePrimaryCtxRelease_v2"},
	fnDeviceGetP2PAttribute:     {name: "cuDeviceGetP2PAttribute"},
	fnCtxSetCurrent:             {name: "cuCtxSetCurrent"},
	fnCtxGetCurrent:             {name: "cuCtxGetCurrent"},
	fnCtxSynchronize:            {name: "cuCtxSynchronize"},
	fnCtxGetStreamPriorityRange: {name: "cuCtxGetStreamPriorityRange"},
	fnCtxEnablePeerAccess:       {name: "cuCtxEnablePeerAccess"},
	fnMemGetInfo:                {name: "cuMemGetInfo_v2"},
	fnMemAlloc:                  {name: "cuMemAlloc_v2"},
	fnMemFree:                   {name: "cuMemFree_v2"},
	fnMemAllocAsync:             {name: "cuMemAllocAsync", optional: true},
	fnMemFreeAsync:              {name: "cuMemFreeAsync", optional: true},
	fnMemPoolSetAttribute:       {name: "cuMemPoolSetAttribute", optional: true},
	fnMemPoolSetAccess:          {name: "cuMemPoolSetAccess", optional: true},
	fnMemPoolTrimTo:             {name: "cuMemPoolTrimTo", optional: true},
	fnMemHostAlloc:              {name: "cuMemHostAlloc"},
	fnMemFreeHost:               {name: "cuMemFreeHost"},
	fnMemcpyHtoDAsync:           {name: "cuMemcpyHtoDAsync_v2"},
	fnMemcpyDtoHAsync:           {name: "cuMemcpyDtoHAsync_v2"},
	fnMemcpyDtoDAsync:           {name: "cuMemcpyDtoDAsync_v2"},
	fnMemcpyPeerAsync:           {name: "cuMemcpyPeerAsync"},
	fnMemsetD8Async:             {name: "cuMemsetD8Async"},
	fnStreamCreateWithPriority:  {name: "cuStreamCreateWithPriority"},
	fnStreamDestroy:             {name: "cuStreamDestroy_v2"},
	fnStreamSynchronize:         {name: "cuStreamSynchronize"},
	fnStreamQuery:               {name: "cuStreamQuery"},
	fnStreamWaitEvent:           {name: "cuStreamWaitEvent"},
	fnEventCreate:               {name: "cuEventCreate"},
	fnEventDestroy:              {name: "cuEventDestroy_v2"},
	fnEventRecord:               {name: "cuEventRecord"},
	fnEventQuery:                {name: "cuEventQuery"},
	fnEventSynchronize:          {name: "cuEventSynchronize"},
	fnEventElapsedTime:          {name: "cuEventElapsedTime"}, // every driver has it; _v2 came with 12.8
	fnModuleLoadData:            {name: "cuModuleLoadData"},
	fnModuleUnload:              {name: "cuModuleUnload"},
	fnModuleGetFunction:         {name: "cuModuleGetFunction"},
	fnLaunchKernel:              {name: "cuLaunchKernel"},
}
