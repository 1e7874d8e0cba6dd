package cudadrv

import "github.com/gochorus/chorus/internal/dl"

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
	fnDevicePrimaryCtxGetState
	fnDeviceGetP2PAttribute
	fnCtxSetCurrent
	fnCtxGetCurrent
	fnCtxSynchronize
	fnCtxGetStreamPriorityRange
	fnCtxEnablePeerAccess
	fnProfilerStart
	fnProfilerStop
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
	fnMemGetAddressRange
	fnPointerGetAttribute
	fnIpcGetMemHandle
	fnIpcOpenMemHandle
	fnIpcCloseMemHandle
	fnMemPoolGetAttribute
	fnMemGetAllocationGranularity
	fnMemAddressReserve
	fnMemAddressFree
	fnMemCreate
	fnMemRelease
	fnMemMap
	fnMemUnmap
	fnMemSetAccess
	fnMemExportToShareableHandle
	fnMemImportFromShareableHandle
	fnMemHostRegister
	fnMemHostUnregister
	fnMemcpyHtoDAsync
	fnMemcpyDtoHAsync
	fnMemcpyDtoDAsync
	fnMemcpyPeerAsync
	fnMemcpy2DAsync
	fnMemsetD8Async
	fnStreamCreateWithPriority
	fnStreamDestroy
	fnStreamSynchronize
	fnStreamQuery
	fnStreamWaitEvent
	fnStreamBatchMemOp
	fnStreamGetPriority
	fnStreamGetCtx
	fnLaunchHostFunc
	fnEventCreate
	fnEventDestroy
	fnEventRecord
	fnEventRecordWithFlags
	fnEventQuery
	fnEventSynchronize
	fnEventElapsedTime
	fnIpcGetEventHandle
	fnIpcOpenEventHandle
	fnModuleLoadData
	fnModuleUnload
	fnModuleGetFunction
	fnLaunchKernel
	fnLaunchCooperativeKernel
	fnFuncGetAttribute
	fnFuncSetAttribute
	fnOccupancyMaxActiveBlocksPerMultiprocessor
	fnOccupancyMaxPotentialBlockSize
	fnStreamBeginCapture
	fnStreamEndCapture
	fnStreamIsCapturing
	fnStreamGetCaptureInfo
	fnThreadExchangeStreamCaptureMode
	fnGraphGetNodes
	fnGraphInstantiateWithFlags
	fnGraphLaunch
	fnGraphUpload
	fnGraphExecUpdate
	fnGraphExecDestroy
	fnGraphDestroy
	fnUserObjectCreate
	fnUserObjectRelease
	fnGraphRetainUserObject
	fnGraphDebugDotPrint
	numFns
)

// symbols has the exported name of each function. cuda.h maps most names to the newest of
// several versions; this table names the version whose prototype the method has,
// independent of the header's version. An optional function may be missing: its method
// returns ErrorNotSupported.
var symbols = [numFns]dl.Func{
	fnInit:                            {Name: "cuInit"},
	fnDriverGetVersion:                {Name: "cuDriverGetVersion"},
	fnDeviceGetCount:                  {Name: "cuDeviceGetCount"},
	fnDeviceGet:                       {Name: "cuDeviceGet"},
	fnDeviceGetName:                   {Name: "cuDeviceGetName"},
	fnDeviceGetUUID:                   {Name: "cuDeviceGetUuid_v2"}, // with MIG, the instance's own
	fnDeviceGetAttribute:              {Name: "cuDeviceGetAttribute"},
	fnDeviceTotalMem:                  {Name: "cuDeviceTotalMem_v2"},
	fnDeviceGetPCIBusID:               {Name: "cuDeviceGetPCIBusId"},
	fnDeviceCanAccessPeer:             {Name: "cuDeviceCanAccessPeer"},
	fnDeviceGetDefaultMemPool:         {Name: "cuDeviceGetDefaultMemPool", Optional: true},
	fnDevicePrimaryCtxRetain:          {Name: "cuDevicePrimaryCtxRetain"},
	fnDevicePrimaryCtxRelease:         {Name: "cuDevicePrimaryCtxRelease_v2"},
	fnDevicePrimaryCtxGetState:        {Name: "cuDevicePrimaryCtxGetState"},
	fnDeviceGetP2PAttribute:           {Name: "cuDeviceGetP2PAttribute"},
	fnCtxSetCurrent:                   {Name: "cuCtxSetCurrent"},
	fnCtxGetCurrent:                   {Name: "cuCtxGetCurrent"},
	fnCtxSynchronize:                  {Name: "cuCtxSynchronize"},
	fnCtxGetStreamPriorityRange:       {Name: "cuCtxGetStreamPriorityRange"},
	fnCtxEnablePeerAccess:             {Name: "cuCtxEnablePeerAccess"},
	fnProfilerStart:                   {Name: "cuProfilerStart"}, // of cudaProfiler.h
	fnProfilerStop:                    {Name: "cuProfilerStop"},
	fnMemGetInfo:                      {Name: "cuMemGetInfo_v2"},
	fnMemAlloc:                        {Name: "cuMemAlloc_v2"},
	fnMemFree:                         {Name: "cuMemFree_v2"},
	fnMemAllocAsync:                   {Name: "cuMemAllocAsync", Optional: true},
	fnMemFreeAsync:                    {Name: "cuMemFreeAsync", Optional: true},
	fnMemPoolSetAttribute:             {Name: "cuMemPoolSetAttribute", Optional: true},
	fnMemPoolSetAccess:                {Name: "cuMemPoolSetAccess", Optional: true},
	fnMemPoolTrimTo:                   {Name: "cuMemPoolTrimTo", Optional: true},
	fnMemHostAlloc:                    {Name: "cuMemHostAlloc"},
	fnMemFreeHost:                     {Name: "cuMemFreeHost"},
	fnMemGetAddressRange:              {Name: "cuMemGetAddressRange_v2"},
	fnPointerGetAttribute:             {Name: "cuPointerGetAttribute"},
	fnIpcGetMemHandle:                 {Name: "cuIpcGetMemHandle"},
	fnIpcOpenMemHandle:                {Name: "cuIpcOpenMemHandle_v2"},
	fnIpcCloseMemHandle:               {Name: "cuIpcCloseMemHandle"},
	fnMemPoolGetAttribute:             {Name: "cuMemPoolGetAttribute", Optional: true},
	fnMemGetAllocationGranularity:     {Name: "cuMemGetAllocationGranularity", Optional: true},
	fnMemAddressReserve:               {Name: "cuMemAddressReserve", Optional: true},
	fnMemAddressFree:                  {Name: "cuMemAddressFree", Optional: true},
	fnMemCreate:                       {Name: "cuMemCreate", Optional: true},
	fnMemRelease:                      {Name: "cuMemRelease", Optional: true},
	fnMemMap:                          {Name: "cuMemMap", Optional: true},
	fnMemUnmap:                        {Name: "cuMemUnmap", Optional: true},
	fnMemSetAccess:                    {Name: "cuMemSetAccess", Optional: true},
	fnMemExportToShareableHandle:      {Name: "cuMemExportToShareableHandle", Optional: true},
	fnMemImportFromShareableHandle:    {Name: "cuMemImportFromShareableHandle", Optional: true},
	fnMemHostRegister:                 {Name: "cuMemHostRegister_v2"},
	fnMemHostUnregister:               {Name: "cuMemHostUnregister"},
	fnMemcpyHtoDAsync:                 {Name: "cuMemcpyHtoDAsync_v2"},
	fnMemcpyDtoHAsync:                 {Name: "cuMemcpyDtoHAsync_v2"},
	fnMemcpyDtoDAsync:                 {Name: "cuMemcpyDtoDAsync_v2"},
	fnMemcpyPeerAsync:                 {Name: "cuMemcpyPeerAsync"},
	fnMemcpy2DAsync:                   {Name: "cuMemcpy2DAsync_v2"},
	fnMemsetD8Async:                   {Name: "cuMemsetD8Async"},
	fnStreamCreateWithPriority:        {Name: "cuStreamCreateWithPriority"},
	fnStreamDestroy:                   {Name: "cuStreamDestroy_v2"},
	fnStreamSynchronize:               {Name: "cuStreamSynchronize"},
	fnStreamQuery:                     {Name: "cuStreamQuery"},
	fnStreamWaitEvent:                 {Name: "cuStreamWaitEvent"},
	fnStreamBatchMemOp:                {Name: "cuStreamBatchMemOp_v2"},
	fnStreamGetPriority:               {Name: "cuStreamGetPriority"},
	fnStreamGetCtx:                    {Name: "cuStreamGetCtx"}, // _v2 is for green contexts
	fnLaunchHostFunc:                  {Name: "cuLaunchHostFunc"},
	fnEventCreate:                     {Name: "cuEventCreate"},
	fnEventDestroy:                    {Name: "cuEventDestroy_v2"},
	fnEventRecord:                     {Name: "cuEventRecord"},
	fnEventRecordWithFlags:            {Name: "cuEventRecordWithFlags"},
	fnEventQuery:                      {Name: "cuEventQuery"},
	fnEventSynchronize:                {Name: "cuEventSynchronize"},
	fnEventElapsedTime:                {Name: "cuEventElapsedTime"}, // every driver has it; _v2 came with 12.8
	fnIpcGetEventHandle:               {Name: "cuIpcGetEventHandle"},
	fnIpcOpenEventHandle:              {Name: "cuIpcOpenEventHandle"},
	fnModuleLoadData:                  {Name: "cuModuleLoadData"},
	fnModuleUnload:                    {Name: "cuModuleUnload"},
	fnModuleGetFunction:               {Name: "cuModuleGetFunction"},
	fnLaunchKernel:                    {Name: "cuLaunchKernel"},
	fnStreamBeginCapture:              {Name: "cuStreamBeginCapture_v2"},
	fnStreamEndCapture:                {Name: "cuStreamEndCapture"},
	fnStreamIsCapturing:               {Name: "cuStreamIsCapturing"},
	fnStreamGetCaptureInfo:            {Name: "cuStreamGetCaptureInfo_v2", Optional: true},
	fnThreadExchangeStreamCaptureMode: {Name: "cuThreadExchangeStreamCaptureMode"},
	fnGraphGetNodes:                   {Name: "cuGraphGetNodes"},
	fnGraphInstantiateWithFlags:       {Name: "cuGraphInstantiateWithFlags"},
	fnGraphLaunch:                     {Name: "cuGraphLaunch"},
	fnGraphUpload:                     {Name: "cuGraphUpload"},
	fnGraphExecUpdate:                 {Name: "cuGraphExecUpdate_v2"},
	fnGraphExecDestroy:                {Name: "cuGraphExecDestroy"},
	fnGraphDestroy:                    {Name: "cuGraphDestroy"},
	fnUserObjectCreate:                {Name: "cuUserObjectCreate"},
	fnUserObjectRelease:               {Name: "cuUserObjectRelease"},
	fnGraphRetainUserObject:           {Name: "cuGraphRetainUserObject"},
	fnGraphDebugDotPrint:              {Name: "cuGraphDebugDotPrint"},

	fnLaunchCooperativeKernel:                   {Name: "cuLaunchCooperativeKernel"},
	fnFuncGetAttribute:                          {Name: "cuFuncGetAttribute"},
	fnFuncSetAttribute:                          {Name: "cuFuncSetAttribute"},
	fnOccupancyMaxActiveBlocksPerMultiprocessor: {Name: "cuOccupancyMaxActiveBlocksPerMultiprocessor"},
	fnOccupancyMaxPotentialBlockSize:            {Name: "cuOccupancyMaxPotentialBlockSize"},
}
