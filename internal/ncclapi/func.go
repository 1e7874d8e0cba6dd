package ncclapi

import "github.com/gochorus/chorus/internal/dl"

// Func names a host function of NCCL, for Has and the symbol table.
type Func int

// The functions in the order of nccl.h, and then those of newer headers.
const (
	FuncGetVersion Func = iota
	FuncGetUniqueID
	FuncGetLastError
	FuncCommInitRankScalable
	FuncCommSplit
	FuncCommShrink
	FuncCommFinalize
	FuncCommDestroy
	FuncCommAbort
	FuncCommGetAsyncError
	FuncCommCount
	FuncCommUserRank
	FuncCommRegister
	FuncCommDeregister
	FuncCommWindowRegister
	FuncCommWindowDeregister
	FuncMemAlloc
	FuncMemFree
	FuncRedOpCreatePreMulSum
	FuncRedOpDestroy
	FuncAllReduce
	FuncBroadcast
	FuncReduce
	FuncAllGather
	FuncReduceScatter
	FuncAlltoAll
	FuncGather
	FuncScatter
	FuncSend
	FuncRecv
	FuncGroupStart
	FuncGroupEnd
	FuncGroupSimulateEnd
	FuncCommRevoke
	FuncCommGetUniqueID
	FuncCommGrow
	FuncCommSuspend
	FuncCommResume
	FuncCommMemStats
	FuncCommQueryProperties
	FuncWinGetUserPtr
	FuncPutSignal
	FuncSignal
	FuncWaitSignal
	FuncParamGetParameter
	FuncParamGetAllParameterKeys
	FuncGetPeerDevicePointer
	FuncAllReduceConfig
	FuncBroadcastConfig
	FuncReduceConfig
	FuncAllGatherConfig
	FuncReduceScatterConfig
	FuncAlltoAllConfig
	FuncGatherConfig
	FuncScatterConfig
	FuncSetEncryption
	FuncDevCommCreate
	FuncDevCommDestroy
	FuncParamBind
	FuncParamGetI64
	FuncParamDumpAll
	NumFuncs
)

// symbols has the C name and the NCCL version that first had the function.
// Those of 2.23 and before are required; Open fails without them.
var symbols = [NumFuncs]dl.Versioned{
	FuncGetVersion:           {"ncclGetVersion", 20000},
	FuncGetUniqueID:          {"ncclGetUniqueId", 20000},
	FuncGetLastError:         {"ncclGetLastError", 21304},
	FuncCommInitRankScalable: {"ncclCommInitRankScalable", 22304},
	FuncCommSplit:            {"ncclCommSplit", 21801},
	FuncCommShrink:           {"ncclCommShrink", 22703},
	FuncCommFinalize:         {"ncclCommFinalize", 21403},
	FuncCommDestroy:          {"ncclCommDestroy", 20000},
	FuncCommAbort:            {"ncclCommAbort", 20402},
	FuncCommGetAsyncError:    {"ncclCommGetAsyncError", 20402},
	FuncCommCount:            {"ncclCommCount", 20000},
	FuncCommUserRank:         {"ncclCommUserRank", 20000},
	FuncCommRegister:         {"ncclCommRegister", 21901},
	FuncCommDeregister:       {"ncclCommDeregister", 21901},
	FuncCommWindowRegister:   {"ncclCommWindowRegister", 22703},
	FuncCommWindowDeregister: {"ncclCommWindowDeregister", 22703},
	FuncMemAlloc:             {"ncclMemAlloc", 21901},
	FuncMemFree:              {"ncclMemFree", 21901},
	FuncRedOpCreatePreMulSum: {"ncclRedOpCreatePreMulSum", 21104},
	FuncRedOpDestroy:         {"ncclRedOpDestroy", 21104},
	FuncAllReduce:            {"ncclAllReduce", 20000},
	FuncBroadcast:            {"ncclBroadcast", 20202},
	FuncReduce:               {"ncclReduce", 20000},
	FuncAllGather:            {"ncclAllGather", 20000},
	FuncReduceScatter:        {"ncclReduceScatter", 20000},
	FuncAlltoAll:             {"ncclAlltoAll", 22803},
	FuncGather:               {"ncclGather", 22803},
	FuncScatter:              {"ncclScatter", 22803},
	FuncSend:                 {"ncclSend", 20703},
	FuncRecv:                 {"ncclRecv", 20703},
	FuncGroupStart:           {"ncclGroupStart", 20000},
	FuncGroupEnd:             {"ncclGroupEnd", 20000},
	FuncGroupSimulateEnd:     {"ncclGroupSimulateEnd", 22203},
	FuncCommRevoke:           {"ncclCommRevoke", 22807},
	FuncCommGetUniqueID:      {"ncclCommGetUniqueId", 22902},
	FuncCommGrow:             {"ncclCommGrow", 22902},
	FuncCommSuspend:          {"ncclCommSuspend", 22907},
	FuncCommResume:           {"ncclCommResume", 22907},
	FuncCommMemStats:         {"ncclCommMemStats", 22907},
	FuncCommQueryProperties:  {"ncclCommQueryProperties", 22902},
	FuncWinGetUserPtr:        {"ncclWinGetUserPtr", 22902},
	FuncPutSignal:            {"ncclPutSignal", 22902},
	FuncSignal:               {"ncclSignal", 22902},
	FuncWaitSignal:           {"ncclWaitSignal", 22902},

	FuncParamGetParameter:        {"ncclParamGetParameter", 23004},
	FuncParamGetAllParameterKeys: {"ncclParamGetAllParameterKeys", 23004},

	FuncGetPeerDevicePointer: {"ncclGetPeerDevicePointer", 22902},
	FuncAllReduceConfig:      {"ncclAllReduceConfig", 23102},
	FuncBroadcastConfig:      {"ncclBroadcastConfig", 23102},
	FuncReduceConfig:         {"ncclReduceConfig", 23102},
	FuncAllGatherConfig:      {"ncclAllGatherConfig", 23102},
	FuncReduceScatterConfig:  {"ncclReduceScatterConfig", 23102},
	FuncAlltoAllConfig:       {"ncclAlltoAllConfig", 23102},
	FuncGatherConfig:         {"ncclGatherConfig", 23102},
	FuncScatterConfig:        {"ncclScatterConfig", 23102},
	FuncSetEncryption:        {"ncclSetEncryption", 23203},

	FuncDevCommCreate:  {"ncclDevCommCreate", 22803},
	FuncDevCommDestroy: {"ncclDevCommDestroy", 22803},
	FuncParamBind:      {"ncclParamBind", 23004},
	FuncParamGetI64:    {"ncclParamGetI64", 23004},
	FuncParamDumpAll:   {"ncclParamDumpAll", 23004},
}

// Name is the C name, such as ncclCommSplit.
func (f Func) Name() string { return symbols[f].Name }

// Since is the version code of the first NCCL that has the function, or 20000
// for those that every NCCL 2 has.
func (f Func) Since() int32 { return symbols[f].Since }
