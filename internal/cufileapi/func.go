package cufileapi

import "github.com/gochorus/chorus/internal/dl"

// Func names a function of cuFile, for Has and the symbol table.
type Func int

// The functions in the order of cufile.h.
const (
	FuncHandleRegister Func = iota
	FuncHandleDeregister
	FuncBufRegister
	FuncBufDeregister
	FuncRead
	FuncWrite
	FuncDriverOpen
	FuncDriverClose
	FuncUseCount
	FuncDriverGetProperties
	FuncDriverSetPollMode
	FuncDriverSetMaxDirectIOSize
	FuncDriverSetMaxCacheSize
	FuncDriverSetMaxPinnedMemSize
	FuncBatchIOSetUp
	FuncBatchIOSubmit
	FuncBatchIOGetStatus
	FuncBatchIOCancel
	FuncBatchIODestroy
	FuncReadAsync
	FuncWriteAsync
	FuncStreamRegister
	FuncStreamDeregister
	FuncGetVersion
	FuncGetParameterSizeT
	FuncGetParameterBool
	FuncGetParameterString
	FuncSetParameterSizeT
	FuncSetParameterBool
	FuncSetParameterString
	FuncGetParameterMinMaxValue
	FuncSetParameterPosixPoolSlabArray
	FuncGetParameterPosixPoolSlabArray
	FuncGetBARSizeInKB
	FuncSetStatsLevel
	FuncGetStatsLevel
	FuncStatsStart
	FuncStatsStop
	FuncStatsReset
	FuncGetStatsL1
	FuncGetStatsL2
	FuncGetStatsL3
	NumFuncs
)

// symbols has the C name and the cuFile version that first had the function. Those
// of 1.7 and before are required; Open fails without them.
var symbols = [NumFuncs]dl.Versioned{
	FuncHandleRegister:            {"cuFileHandleRegister", 1000},
	FuncHandleDeregister:          {"cuFileHandleDeregister", 1000},
	FuncBufRegister:               {"cuFileBufRegister", 1000},
	FuncBufDeregister:             {"cuFileBufDeregister", 1000},
	FuncRead:                      {"cuFileRead", 1000},
	FuncWrite:                     {"cuFileWrite", 1000},
	FuncDriverOpen:                {"cuFileDriverOpen", 1000},
	FuncDriverClose:               {"cuFileDriverClose_v2", 1040},
	FuncUseCount:                  {"cuFileUseCount", 1040},
	FuncDriverGetProperties:       {"cuFileDriverGetProperties", 1000},
	FuncDriverSetPollMode:         {"cuFileDriverSetPollMode", 1000},
	FuncDriverSetMaxDirectIOSize:  {"cuFileDriverSetMaxDirectIOSize", 1000},
	FuncDriverSetMaxCacheSize:     {"cuFileDriverSetMaxCacheSize", 1000},
	FuncDriverSetMaxPinnedMemSize: {"cuFileDriverSetMaxPinnedMemSize", 1000},
	FuncBatchIOSetUp:              {"cuFileBatchIOSetUp", 1020},
	FuncBatchIOSubmit:             {"cuFileBatchIOSubmit", 1020},
	FuncBatchIOGetStatus:          {"cuFileBatchIOGetStatus", 1020},
	FuncBatchIOCancel:             {"cuFileBatchIOCancel", 1020},
	FuncBatchIODestroy:            {"cuFileBatchIODestroy", 1020},
	FuncReadAsync:                 {"cuFileReadAsync", 1070},
	FuncWriteAsync:                {"cuFileWriteAsync", 1070},
	FuncStreamRegister:            {"cuFileStreamRegister", 1070},
	FuncStreamDeregister:          {"cuFileStreamDeregister", 1070},
	FuncGetVersion:                {"cuFileGetVersion", 1080},
	FuncGetParameterSizeT:         {"cuFileGetParameterSizeT", 1140},
	FuncGetParameterBool:          {"cuFileGetParameterBool", 1140},
	FuncGetParameterString:        {"cuFileGetParameterString", 1140},
	FuncSetParameterSizeT:         {"cuFileSetParameterSizeT", 1140},
	FuncSetParameterBool:          {"cuFileSetParameterBool", 1140},
	FuncSetParameterString:        {"cuFileSetParameterString", 1140},
	FuncGetParameterMinMaxValue:   {"cuFileGetParameterMinMaxValue", 1150},

	FuncSetParameterPosixPoolSlabArray: {"cuFileSetParameterPosixPoolSlabArray", 1150},
	FuncGetParameterPosixPoolSlabArray: {"cuFileGetParameterPosixPoolSlabArray", 1150},

	FuncGetBARSizeInKB: {"cuFileGetBARSizeInKB", 1150},
	FuncSetStatsLevel:  {"cuFileSetStatsLevel", 1150},
	FuncGetStatsLevel:  {"cuFileGetStatsLevel", 1150},
	FuncStatsStart:     {"cuFileStatsStart", 1150},
	FuncStatsStop:      {"cuFileStatsStop", 1150},
	FuncStatsReset:     {"cuFileStatsReset", 1150},
	FuncGetStatsL1:     {"cuFileGetStatsL1", 1150},
	FuncGetStatsL2:     {"cuFileGetStatsL2", 1150},
	FuncGetStatsL3:     {"cuFileGetStatsL3", 1150},
}

// Name is the C name, such as cuFileRead.
func (f Func) Name() string { return symbols[f].Name }

// Since is the version code of the first cuFile that has the function.
func (f Func) Since() int32 { return symbols[f].Since }
