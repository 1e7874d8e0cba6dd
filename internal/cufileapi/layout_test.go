package cufileapi

import (
	"fmt"
	"reflect"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

// structs has the C name of each struct.
var structs = []struct {
	c string
	v any
}{
	{"CUfileDescr_t", Descr{}}, {"CUfileDrvProps_t", DrvProps{}}, {"CUfileIOParams_t", IOParams{}}, {"CUfileIOEvents_t", IOEvents{}},
	{"CUfileOpCounter_t", OpCounter{}}, {"CUfilePerGpuStats_t", PerGPUStats{}},
	{"CUfileStatsLevel1_t", StatsLevel1{}}, {"CUfileStatsLevel2_t", StatsLevel2{}}, {"CUfileStatsLevel3_t", StatsLevel3{}},
}

// The golden file has the offset and size of every field, as C lays them out.
func TestLayouts(t *testing.T) {
	text := ""
	for _, s := range structs {
		typ := reflect.TypeOf(s.v)
		text += fmt.Sprintf("%s %s %d\n", s.c, typ.Name(), typ.Size())
		for f := range typ.Fields() {
			text += fmt.Sprintf("\t%4d %d %s\n", f.Offset, f.Type.Size(), f.Name)
		}
	}
	dltest.Golden(t, "testdata/layout.golden", text)
}

// The sizes and offsets of C, computed from the headers of CUDA 13.0 by a compiler.
func TestLayoutsAreThoseOfC(t *testing.T) {
	var d Descr
	var p DrvProps
	var io IOParams
	var e IOEvents
	var one StatsLevel1
	var two StatsLevel2
	var three StatsLevel3
	for name, x := range map[string][2]uintptr{
		"Descr": {unsafe.Sizeof(d), 24}, "Descr.FD": {unsafe.Offsetof(d.FD), 8}, "Descr.FSOps": {unsafe.Offsetof(d.FSOps), 16},
		"DrvProps": {unsafe.Sizeof(p), 56}, "DrvProps.PollThreshSize": {unsafe.Offsetof(p.PollThreshSize), 8},
		"DrvProps.MaxDirectIOSize": {unsafe.Offsetof(p.MaxDirectIOSize), 16}, "DrvProps.DStatusFlags": {unsafe.Offsetof(p.DStatusFlags), 24},
		"DrvProps.DControlFlags": {unsafe.Offsetof(p.DControlFlags), 28}, "DrvProps.FFlags": {unsafe.Offsetof(p.FFlags), 32},
		"DrvProps.MaxDeviceCacheSize":     {unsafe.Offsetof(p.MaxDeviceCacheSize), 36},
		"DrvProps.PerBufferCacheSize":     {unsafe.Offsetof(p.PerBufferCacheSize), 40},
		"DrvProps.MaxDevicePinnedMemSize": {unsafe.Offsetof(p.MaxDevicePinnedMemSize), 44},
		"DrvProps.MaxBatchIOSize":         {unsafe.Offsetof(p.MaxBatchIOSize), 48},
		"DrvProps.MaxBatchIOTimeout":      {unsafe.Offsetof(p.MaxBatchIOTimeoutMillis), 52},
		"IOParams":                        {unsafe.Sizeof(io), 64}, "IOParams.DevPtrBase": {unsafe.Offsetof(io.DevPtrBase), 8},
		"IOParams.FileOffset": {unsafe.Offsetof(io.FileOffset), 16}, "IOParams.DevOffset": {unsafe.Offsetof(io.DevOffset), 24},
		"IOParams.Size": {unsafe.Offsetof(io.Size), 32}, "IOParams.Handle": {unsafe.Offsetof(io.Handle), 40},
		"IOParams.Opcode": {unsafe.Offsetof(io.Opcode), 48}, "IOParams.Cookie": {unsafe.Offsetof(io.Cookie), 56},
		"IOEvents": {unsafe.Sizeof(e), 24}, "IOEvents.Status": {unsafe.Offsetof(e.Status), 8}, "IOEvents.Ret": {unsafe.Offsetof(e.Ret), 16},
		"OpCounter": {unsafe.Sizeof(OpCounter{}), 16}, "PerGPUStats": {unsafe.Sizeof(PerGPUStats{}), 248},
		"StatsLevel1": {unsafe.Sizeof(one), 512}, "StatsLevel1.ReadBytes": {unsafe.Offsetof(one.ReadBytes), 96},
		"StatsLevel1.BatchSubmitOps": {unsafe.Offsetof(one.BatchSubmitOps), 176}, "StatsLevel1.BatchReadBytes": {unsafe.Offsetof(one.BatchReadBytes), 416},
		"StatsLevel2": {unsafe.Sizeof(two), 1024}, "StatsLevel2.ReadSizeHist": {unsafe.Offsetof(two.ReadSizeHist), 512},
		"StatsLevel2.WriteSizeHist": {unsafe.Offsetof(two.WriteSizeHist), 768},
		"StatsLevel3":               {unsafe.Sizeof(three), 5000}, "StatsLevel3.NumGPUs": {unsafe.Offsetof(three.NumGPUs), 1024},
		"StatsLevel3.PerGPU": {unsafe.Offsetof(three.PerGPU), 1032}, "Timespec": {unsafe.Sizeof(Timespec{}), 16},
	} {
		require.Equal(t, x[1], x[0], name)
	}
}
