package cudadrv

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

func TestHeaderResults(t *testing.T) {
	table := map[string]int64{}
	for r, e := range results {
		table[e.name] = int64(r)
	}
	dltest.FindHeader(t, "cuda.h").RequireResults(`CUDA_(?:SUCCESS|ERROR_[A-Z0-9_]+)`, table)
}

func TestHeaderPrototypes(t *testing.T) {
	dltest.FindHeader(t, "cuda.h").RequirePrototypes(signatures)
	dltest.FindHeader(t, "cudaProfiler.h").RequirePrototypes(signatures)
}

func TestHeaderValues(t *testing.T) {
	dltest.FindHeader(t, "cuda.h").RequireValues(map[string]int64{
		"CU_STREAM_DEFAULT":                        int64(StreamDefault),
		"CU_STREAM_NON_BLOCKING":                   int64(StreamNonBlocking),
		"CU_EVENT_DEFAULT":                         int64(EventDefault),
		"CU_EVENT_BLOCKING_SYNC":                   int64(EventBlockingSync),
		"CU_EVENT_DISABLE_TIMING":                  int64(EventDisableTiming),
		"CU_EVENT_INTERPROCESS":                    int64(EventInterprocess),
		"CU_EVENT_RECORD_EXTERNAL":                 int64(EventExternal),
		"CU_EVENT_WAIT_EXTERNAL":                   int64(EventExternal),
		"CU_MEMHOSTALLOC_PORTABLE":                 int64(MemHostAllocPortable),
		"CU_MEMPOOL_ATTR_RELEASE_THRESHOLD":        int64(MemPoolAttrReleaseThreshold),
		"CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT":     int64(MemPoolAttrReservedCurrent),
		"CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH":        int64(MemPoolAttrReservedHigh),
		"CU_MEMPOOL_ATTR_USED_MEM_CURRENT":         int64(MemPoolAttrUsedCurrent),
		"CU_MEMPOOL_ATTR_USED_MEM_HIGH":            int64(MemPoolAttrUsedHigh),
		"CU_MEMHOSTREGISTER_PORTABLE":              int64(MemHostRegisterPortable),
		"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS":       int64(IpcMemLazyEnablePeerAccess),
		"CU_MEM_LOCATION_TYPE_DEVICE":              memLocationTypeDevice,
		"CU_MEM_ALLOCATION_TYPE_PINNED":            memAllocationTypePinned,
		"CU_MEM_HANDLE_TYPE_NONE":                  int64(MemHandleNone),
		"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": int64(MemHandlePosixFD),
		"CU_MEM_ALLOC_GRANULARITY_MINIMUM":         int64(MemGranularityMinimum),
		"CU_MEM_ALLOC_GRANULARITY_RECOMMENDED":     int64(MemGranularityRecommended),
		"CU_MEM_ACCESS_FLAGS_PROT_NONE":            int64(MemAccessNone),
		"CU_MEM_ACCESS_FLAGS_PROT_READ":            int64(MemAccessRead),
		"CU_MEM_ACCESS_FLAGS_PROT_READWRITE":       int64(MemAccessReadWrite),

		"CU_STREAM_CAPTURE_MODE_GLOBAL":                          int64(CaptureGlobal),
		"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL":                    int64(CaptureThreadLocal),
		"CU_STREAM_CAPTURE_MODE_RELAXED":                         int64(CaptureRelaxed),
		"CU_STREAM_CAPTURE_STATUS_NONE":                          int64(CaptureNone),
		"CU_STREAM_CAPTURE_STATUS_ACTIVE":                        int64(CaptureActive),
		"CU_STREAM_CAPTURE_STATUS_INVALIDATED":                   int64(CaptureInvalidated),
		"CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH":        int64(GraphInstantiateAutoFree),
		"CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY":          int64(GraphInstantiateNodePriority),
		"CU_GRAPH_USER_OBJECT_MOVE":                              int64(GraphUserObjectMove),
		"CU_USER_OBJECT_NO_DESTRUCTOR_SYNC":                      userObjectNoDestructorSync,
		"CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE":                       int64(GraphDotVerbose),
		"CU_GRAPH_EXEC_UPDATE_SUCCESS":                           int64(GraphUpdateSuccess),
		"CU_GRAPH_EXEC_UPDATE_ERROR":                             int64(GraphUpdateError),
		"CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED":            int64(GraphUpdateTopologyChanged),
		"CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED":           int64(GraphUpdateNodeTypeChanged),
		"CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED":            int64(GraphUpdateFunctionChanged),
		"CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED":          int64(GraphUpdateParametersChanged),
		"CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED":               int64(GraphUpdateNotSupported),
		"CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE": int64(GraphUpdateUnsupportedFunctionChange),
		"CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED":          int64(GraphUpdateAttributesChanged),
		"sizeof(CUgraphExecUpdateResultInfo)":                    int64(unsafe.Sizeof(graphExecUpdateResultInfo{})),
		"offsetof(CUgraphExecUpdateResultInfo, result)":          int64(unsafe.Offsetof(graphExecUpdateResultInfo{}.Result)),

		"CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK":                       int64(AttrMaxThreadsPerBlock),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK":                 int64(AttrMaxSharedMemoryPerBlock),
		"CU_DEVICE_ATTRIBUTE_WARP_SIZE":                                   int64(AttrWarpSize),
		"CU_DEVICE_ATTRIBUTE_CLOCK_RATE":                                  int64(AttrClockRate),
		"CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT":                        int64(AttrMultiprocessorCount),
		"CU_DEVICE_ATTRIBUTE_PCI_BUS_ID":                                  int64(AttrPCIBusID),
		"CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID":                               int64(AttrPCIDeviceID),
		"CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE":                           int64(AttrMemoryClockRate),
		"CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH":                     int64(AttrGlobalMemoryBusWidth),
		"CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE":                               int64(AttrL2CacheSize),
		"CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR":              int64(AttrMaxThreadsPerMultiprocessor),
		"CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID":                               int64(AttrPCIDomainID),
		"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR":                    int64(AttrComputeCapabilityMajor),
		"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR":                    int64(AttrComputeCapabilityMinor),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR":        int64(AttrMaxSharedMemoryPerSM),
		"CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH":                          int64(AttrCooperativeLaunch),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN":           int64(AttrMaxSharedMemoryOptin),
		"CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK":                         int64(FuncMaxThreadsPerBlock),
		"CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES":                             int64(FuncSharedBytes),
		"CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES":                              int64(FuncConstBytes),
		"CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES":                              int64(FuncLocalBytes),
		"CU_FUNC_ATTRIBUTE_NUM_REGS":                                      int64(FuncRegisters),
		"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES":                 int64(FuncMaxDynamicSharedBytes),
		"CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED":                      int64(AttrMemoryPoolsSupported),
		"CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED":                     int64(AttrHostRegisterSupported),
		"CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED":         int64(AttrVMMSupported),
		"CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": int64(AttrPosixFDHandleSupported),
		"CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED":     int64(AttrGPUDirectRDMAWithVMM),

		"CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK":        int64(P2PPerformanceRank),
		"CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED":        int64(P2PAccessSupported),
		"CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED": int64(P2PNativeAtomics),

		"sizeof(CUdeviceptr)":                  int64(unsafe.Sizeof(DevicePtr(0))),
		"sizeof(CUdevice)":                     int64(unsafe.Sizeof(Device(0))),
		"sizeof(CUipcEventHandle)":             int64(unsafe.Sizeof(IpcEventHandle{})),
		"sizeof(CUuuid)":                       int64(unsafe.Sizeof(UUID{})),
		"sizeof(CUipcMemHandle)":               int64(unsafe.Sizeof(IpcMemHandle{})),
		"sizeof(CUmemGenericAllocationHandle)": int64(unsafe.Sizeof(MemHandle(0))),
		"sizeof(CUmemLocation)":                int64(unsafe.Sizeof(memLocation{})),
		"offsetof(CUmemLocation, type)":        int64(unsafe.Offsetof(memLocation{}.Type)),
		"offsetof(CUmemLocation, id)":          int64(unsafe.Offsetof(memLocation{}.ID)),
		"sizeof(CUmemAccessDesc)":              int64(unsafe.Sizeof(memAccessDesc{})),
		"offsetof(CUmemAccessDesc, location)":  int64(unsafe.Offsetof(memAccessDesc{}.Location)),
		"offsetof(CUmemAccessDesc, flags)":     int64(unsafe.Offsetof(memAccessDesc{}.Flags)),

		"sizeof(CUmemAllocationProp)":                                    int64(unsafe.Sizeof(memAllocationProp{})),
		"offsetof(CUmemAllocationProp, type)":                            int64(unsafe.Offsetof(memAllocationProp{}.Type)),
		"offsetof(CUmemAllocationProp, requestedHandleTypes)":            int64(unsafe.Offsetof(memAllocationProp{}.RequestedHandleTypes)),
		"offsetof(CUmemAllocationProp, location)":                        int64(unsafe.Offsetof(memAllocationProp{}.Location)),
		"offsetof(CUmemAllocationProp, win32HandleMetaData)":             int64(unsafe.Offsetof(memAllocationProp{}.Win32HandleMetaData)),
		"offsetof(CUmemAllocationProp, allocFlags.compressionType)":      int64(unsafe.Offsetof(memAllocationProp{}.CompressionType)),
		"offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)": int64(unsafe.Offsetof(memAllocationProp{}.GPUDirectRDMACapable)),
		"offsetof(CUmemAllocationProp, allocFlags.usage)":                int64(unsafe.Offsetof(memAllocationProp{}.Usage)),
		"CU_MEMORYTYPE_UNIFIED":                                          memoryTypeUnified,
		"sizeof(CUDA_MEMCPY2D)":                                          int64(unsafe.Sizeof(memcpy2D{})),
		"offsetof(CUDA_MEMCPY2D, srcMemoryType)":                         int64(unsafe.Offsetof(memcpy2D{}.SrcMemoryType)),
		"offsetof(CUDA_MEMCPY2D, srcDevice)":                             int64(unsafe.Offsetof(memcpy2D{}.SrcDevice)),
		"offsetof(CUDA_MEMCPY2D, srcPitch)":                              int64(unsafe.Offsetof(memcpy2D{}.SrcPitch)),
		"offsetof(CUDA_MEMCPY2D, dstMemoryType)":                         int64(unsafe.Offsetof(memcpy2D{}.DstMemoryType)),
		"offsetof(CUDA_MEMCPY2D, dstDevice)":                             int64(unsafe.Offsetof(memcpy2D{}.DstDevice)),
		"offsetof(CUDA_MEMCPY2D, dstPitch)":                              int64(unsafe.Offsetof(memcpy2D{}.DstPitch)),
		"offsetof(CUDA_MEMCPY2D, WidthInBytes)":                          int64(unsafe.Offsetof(memcpy2D{}.WidthInBytes)),
		"offsetof(CUDA_MEMCPY2D, Height)":                                int64(unsafe.Offsetof(memcpy2D{}.Height)),
		"CU_STREAM_MEM_OP_WAIT_VALUE_32":                                 streamMemOpWaitValue32,
		"CU_STREAM_MEM_OP_WRITE_VALUE_32":                                streamMemOpWriteValue32,
		"CU_STREAM_WAIT_VALUE_AND":                                       streamWaitValueAnd,
		"sizeof(CUstreamBatchMemOpParams)":                               int64(unsafe.Sizeof(streamMemOp{})),
		"offsetof(CUstreamBatchMemOpParams, waitValue.address)":          int64(unsafe.Offsetof(streamMemOp{}.Address)),
		"offsetof(CUstreamBatchMemOpParams, waitValue.value)":            int64(unsafe.Offsetof(streamMemOp{}.Value)),
		"offsetof(CUstreamBatchMemOpParams, waitValue.flags)":            int64(unsafe.Offsetof(streamMemOp{}.Flags)),
		"offsetof(CUstreamBatchMemOpParams, writeValue.address)":         int64(unsafe.Offsetof(streamMemOp{}.Address)),
		"offsetof(CUstreamBatchMemOpParams, writeValue.value)":           int64(unsafe.Offsetof(streamMemOp{}.Value)),
		"offsetof(CUstreamBatchMemOpParams, writeValue.flags)":           int64(unsafe.Offsetof(streamMemOp{}.Flags)),
		"sizeof(CUmemPoolProps)":                                         int64(unsafe.Sizeof(memPoolProps{})),
		"offsetof(CUmemPoolProps, allocType)":                            int64(unsafe.Offsetof(memPoolProps{}.AllocType)),
		"offsetof(CUmemPoolProps, handleTypes)":                          int64(unsafe.Offsetof(memPoolProps{}.HandleTypes)),
		"offsetof(CUmemPoolProps, location)":                             int64(unsafe.Offsetof(memPoolProps{}.Location)),
		"offsetof(CUmemPoolProps, win32SecurityAttributes)":              int64(unsafe.Offsetof(memPoolProps{}.Win32SecurityAttributes)),
	})
}

// The layouts have a test of their own for machines without the header.
func TestMemoryLayouts(t *testing.T) {
	a, p, m, c, o := memAccessDesc{}, memAllocationProp{}, memPoolProps{}, memcpy2D{}, streamMemOp{}
	require.Equal(t, []uintptr{48, 8, 16, 24, 32}, []uintptr{unsafe.Sizeof(o), unsafe.Offsetof(o.Address), unsafe.Offsetof(o.Value),
		unsafe.Offsetof(o.Flags), unsafe.Offsetof(o.Alias)})
	require.Equal(t, []uintptr{128, 16, 32, 48, 72, 88, 104, 112, 120}, []uintptr{unsafe.Sizeof(c), unsafe.Offsetof(c.SrcMemoryType),
		unsafe.Offsetof(c.SrcDevice), unsafe.Offsetof(c.SrcPitch), unsafe.Offsetof(c.DstMemoryType), unsafe.Offsetof(c.DstDevice),
		unsafe.Offsetof(c.DstPitch), unsafe.Offsetof(c.WidthInBytes), unsafe.Offsetof(c.Height)})
	require.Equal(t, []uintptr{12, 0, 4, 8}, []uintptr{unsafe.Sizeof(a),
		unsafe.Offsetof(a.Location.Type), unsafe.Offsetof(a.Location.ID), unsafe.Offsetof(a.Flags)})
	require.Equal(t, []uintptr{32, 0, 4, 8, 16, 24, 25, 26}, []uintptr{unsafe.Sizeof(p), unsafe.Offsetof(p.Type),
		unsafe.Offsetof(p.RequestedHandleTypes), unsafe.Offsetof(p.Location), unsafe.Offsetof(p.Win32HandleMetaData),
		unsafe.Offsetof(p.CompressionType), unsafe.Offsetof(p.GPUDirectRDMACapable), unsafe.Offsetof(p.Usage)})
	require.Equal(t, []uintptr{88, 0, 4, 8, 16, 24, 32}, []uintptr{unsafe.Sizeof(m), unsafe.Offsetof(m.AllocType),
		unsafe.Offsetof(m.HandleTypes), unsafe.Offsetof(m.Location), unsafe.Offsetof(m.Win32SecurityAttributes),
		unsafe.Offsetof(m.MaxSize), unsafe.Offsetof(m.Usage)})
}
