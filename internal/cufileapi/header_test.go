package cufileapi

import (
	"fmt"
	"regexp"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

func findHeader(t *testing.T) *dltest.Header { return dltest.FindHeader(t, "cufile.h", "cuda.h") }

// require checks those of the values that the header, which may be older, knows.
func requireKnown(t *testing.T, h *dltest.Header, values map[string]int64) {
	t.Helper()
	known := map[string]int64{}
	for c, v := range values {
		all := true
		for _, word := range regexp.MustCompile(`[A-Za-z_]\w+`).FindAllString(c, -1) {
			all = all && (word == "sizeof" || word == "offsetof" || h.Mentions(word))
		}
		if all {
			known[c] = v
		}
	}
	require.NotEmpty(t, known)
	h.RequireValues(known)
}

func TestHeaderResults(t *testing.T) {
	h := findHeader(t)
	values := map[string]int64{}
	for r, e := range results {
		if r != MissingSymbol {
			values[e.name] = int64(r)
		}
	}
	requireKnown(t, h, values)
	for _, name := range h.Names(`CUFILE_OP\(\s*CUFILEOP_BASE_ERR\s*\+\s*\d+\s*,\s*(\w+)`) {
		require.Contains(t, values, name)
	}
}

func TestHeaderPrototypes(t *testing.T) { findHeader(t).RequirePrototypes(signatures) }

func TestHeaderConstants(t *testing.T) {
	requireKnown(t, findHeader(t), map[string]int64{
		"CU_FILE_HANDLE_TYPE_OPAQUE_FD": int64(OpaqueFD), "CU_FILE_HANDLE_TYPE_OPAQUE_WIN32": int64(OpaqueWin32),
		"CU_FILE_HANDLE_TYPE_USERSPACE_FS": int64(UserspaceFS), "CU_FILE_RDMA_REGISTER": int64(RDMARegister),
		"CU_FILE_RDMA_RELAXED_ORDERING": int64(RDMARelaxedOrdering), "CUFILE_BATCH": int64(BatchMode),
		"CUFILE_READ": int64(OpRead), "CUFILE_WRITE": int64(OpWrite),
		"CUFILE_WAITING": int64(Waiting), "CUFILE_PENDING": int64(Pending), "CUFILE_INVALID": int64(Invalid),
		"CUFILE_CANCELED": int64(Canceled), "CUFILE_COMPLETE": int64(Complete), "CUFILE_TIMEOUT": int64(TimedOut), "CUFILE_FAILED": int64(Failed),
		"CU_FILE_STREAM_FIXED_BUF_OFFSET": int64(FixedBufOffset), "CU_FILE_STREAM_FIXED_FILE_OFFSET": int64(FixedFileOffset),
		"CU_FILE_STREAM_FIXED_FILE_SIZE": int64(FixedFileSize), "CU_FILE_STREAM_PAGE_ALIGNED_INPUTS": int64(PageAlignedInputs),
		"CU_FILE_LUSTRE_SUPPORTED": LustreSupported, "CU_FILE_SCATEFS_SUPPORTED": ScateFSSupported, "CU_FILE_NVME_P2P_SUPPORTED": NVMeP2PSupported,
		"CU_FILE_USE_POLL_MODE": UsePollMode, "CU_FILE_ALLOW_COMPAT_MODE": AllowCompatMode,
		"CU_FILE_DYN_ROUTING_SUPPORTED": DynRoutingSupported, "CU_FILE_BATCH_IO_SUPPORTED": BatchIOSupported,
		"CU_FILE_STREAMS_SUPPORTED": StreamsSupported, "CU_FILE_PARALLEL_IO_SUPPORTED": ParallelIOSupported,
		"CUFILE_PARAM_PROFILE_STATS": int64(ProfileStats), "CUFILE_PARAM_EXECUTION_MAX_IO_THREADS": int64(MaxIOThreads),
		"CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM": int64(MaxRequestParallelism),
		"CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB":  int64(MaxDirectIOSizeKB),
		"CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE":           int64(IOBatchSize),
		"CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS":    int64(BatchIOTimeoutMillis),
		"CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE":      int64(ParamAllowCompatMode),
		"CUFILE_PARAM_FORCE_COMPAT_MODE":                 int64(ParamForceCompatMode),
		"CUFILE_PARAM_EXECUTION_PARALLEL_IO":             int64(ParallelIO),
		"CUFILE_PARAM_PREFER_IO_URING":                   int64(PreferIOUring),
		"CUFILE_PARAM_SKIP_TOPOLOGY_DETECTION":           int64(SkipTopologyDetection),
		"CUFILE_PARAM_STREAM_MEMOPS_BYPASS":              int64(StreamMemopsBypass),
		"CUFILE_PARAM_LOGGING_LEVEL":                     int64(LoggingLevel),
		"CUFILE_PARAM_ENV_LOGFILE_PATH":                  int64(EnvLogfilePath),
		"CUFILE_PARAM_LOG_DIR":                           int64(LogDir),
	})
}

func TestHeaderLayouts(t *testing.T) {
	h := findHeader(t)
	values := map[string]int64{"sizeof(CUfileError_t)": int64(unsafe.Sizeof(Result(0)))}
	for _, s := range structs {
		values[fmt.Sprintf("sizeof(%s)", s.c)] = map[string]int64{
			"CUfileDescr_t": 24, "CUfileDrvProps_t": 56, "CUfileIOParams_t": 64, "CUfileIOEvents_t": 24, "CUfileOpCounter_t": 16,
			"CUfilePerGpuStats_t": 248, "CUfileStatsLevel1_t": 512, "CUfileStatsLevel2_t": 1024, "CUfileStatsLevel3_t": 5000,
		}[s.c]
	}
	var p DrvProps
	var io IOParams
	var e IOEvents
	var one StatsLevel1
	var g PerGPUStats
	for c, offset := range map[string]uintptr{
		"CUfileDescr_t, fs_ops":    unsafe.Offsetof(Descr{}.FSOps),
		"CUfileDrvProps_t, fflags": unsafe.Offsetof(p.FFlags), "CUfileDrvProps_t, max_device_cache_size": unsafe.Offsetof(p.MaxDeviceCacheSize),
		"CUfileDrvProps_t, max_batch_io_timeout_msecs": unsafe.Offsetof(p.MaxBatchIOTimeoutMillis),
		"CUfileIOParams_t, fh":                         unsafe.Offsetof(io.Handle), "CUfileIOParams_t, opcode": unsafe.Offsetof(io.Opcode),
		"CUfileIOParams_t, cookie": unsafe.Offsetof(io.Cookie), "CUfileIOEvents_t, status": unsafe.Offsetof(e.Status),
		"CUfileIOEvents_t, ret": unsafe.Offsetof(e.Ret), "CUfileStatsLevel1_t, read_bytes": unsafe.Offsetof(one.ReadBytes),
		"CUfileStatsLevel1_t, read_lat_sum_us":           unsafe.Offsetof(one.ReadLatencySum),
		"CUfileStatsLevel1_t, batch_cancel_ops":          unsafe.Offsetof(one.BatchCancelOps),
		"CUfileStatsLevel1_t, batch_mixed_io_submit_ops": unsafe.Offsetof(one.BatchMixedSubmitOps),
		"CUfileStatsLevel1_t, last_batch_read_bytes":     unsafe.Offsetof(one.LastBatchReadBytes),
		"CUfileStatsLevel2_t, write_size_kb_hist":        unsafe.Offsetof(StatsLevel2{}.WriteSizeHist),
		"CUfilePerGpuStats_t, n_reads_err":               unsafe.Offsetof(g.ReadErrors), "CUfilePerGpuStats_t, writes_bytes": unsafe.Offsetof(g.WriteBytes),
		"CUfilePerGpuStats_t, n_posix_writes": unsafe.Offsetof(g.PosixWrites), "CUfilePerGpuStats_t, n_mmap_err": unsafe.Offsetof(g.BufRegistersFailed),
		"CUfilePerGpuStats_t, reg_bytes": unsafe.Offsetof(g.RegisteredBytes), "CUfileStatsLevel3_t, num_gpus": unsafe.Offsetof(StatsLevel3{}.NumGPUs),
	} {
		values["offsetof("+c+")"] = int64(offset)
	}
	requireKnown(t, h, values)
}
