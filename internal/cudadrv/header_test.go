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
		"CU_STREAM_DEFAULT":                  int64(StreamDefault),
		"CU_STREAM_NON_BLOCKING":             int64(StreamNonBlocking),
		"CU_EVENT_DEFAULT":                   int64(EventDefault),
		"CU_EVENT_BLOCKING_SYNC":             int64(EventBlockingSync),
		"CU_EVENT_DISABLE_TIMING":            int64(EventDisableTiming),
		"CU_EVENT_INTERPROCESS":              int64(EventInterprocess),
		"CU_MEMHOSTALLOC_PORTABLE":           int64(MemHostAllocPortable),
		"CU_MEMPOOL_ATTR_RELEASE_THRESHOLD":  int64(MemPoolAttrReleaseThreshold),
		"CU_MEM_LOCATION_TYPE_DEVICE":        memLocationTypeDevice,
		"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": memAccessFlagsProtReadWrite,

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

		"CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK":                int64(AttrMaxThreadsPerBlock),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK":          int64(AttrMaxSharedMemoryPerBlock),
		"CU_DEVICE_ATTRIBUTE_WARP_SIZE":                            int64(AttrWarpSize),
		"CU_DEVICE_ATTRIBUTE_CLOCK_RATE":                           int64(AttrClockRate),
		"CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT":                 int64(AttrMultiprocessorCount),
		"CU_DEVICE_ATTRIBUTE_PCI_BUS_ID":                           int64(AttrPCIBusID),
		"CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID":                        int64(AttrPCIDeviceID),
		"CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE":                    int64(AttrMemoryClockRate),
		"CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH":              int64(AttrGlobalMemoryBusWidth),
		"CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE":                        int64(AttrL2CacheSize),
		"CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR":       int64(AttrMaxThreadsPerMultiprocessor),
		"CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID":                        int64(AttrPCIDomainID),
		"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR":             int64(AttrComputeCapabilityMajor),
		"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR":             int64(AttrComputeCapabilityMinor),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": int64(AttrMaxSharedMemoryPerSM),
		"CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH":                   int64(AttrCooperativeLaunch),
		"CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN":    int64(AttrMaxSharedMemoryOptin),
		"CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK":                  int64(FuncMaxThreadsPerBlock),
		"CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES":                      int64(FuncSharedBytes),
		"CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES":                       int64(FuncConstBytes),
		"CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES":                       int64(FuncLocalBytes),
		"CU_FUNC_ATTRIBUTE_NUM_REGS":                               int64(FuncRegisters),
		"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES":          int64(FuncMaxDynamicSharedBytes),
		"CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED":               int64(AttrMemoryPoolsSupported),

		"CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK":        int64(P2PPerformanceRank),
		"CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED":        int64(P2PAccessSupported),
		"CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED": int64(P2PNativeAtomics),

		"sizeof(CUdeviceptr)":                      int64(unsafe.Sizeof(DevicePtr(0))),
		"sizeof(CUdevice)":                         int64(unsafe.Sizeof(Device(0))),
		"sizeof(CUipcEventHandle)":                 int64(unsafe.Sizeof(IpcEventHandle{})),
		"sizeof(CUuuid)":                           int64(unsafe.Sizeof(UUID{})),
		"sizeof(CUmemAccessDesc)":                  int64(unsafe.Sizeof(memAccessDesc{})),
		"offsetof(CUmemAccessDesc, location.type)": int64(unsafe.Offsetof(memAccessDesc{}.LocationType)),
		"offsetof(CUmemAccessDesc, location.id)":   int64(unsafe.Offsetof(memAccessDesc{}.LocationID)),
		"offsetof(CUmemAccessDesc, flags)":         int64(unsafe.Offsetof(memAccessDesc{}.Flags)),
	})
}

// The layout has a test of its own for machines without the header.
func TestMemAccessDescLayout(t *testing.T) {
	d := memAccessDesc{}
	require.Equal(t, []uintptr{12, 0, 4, 8}, []uintptr{unsafe.Sizeof(d),
		unsafe.Offsetof(d.LocationType), unsafe.Offsetof(d.LocationID), unsafe.Offsetof(d.Flags)})
}
