package cufileapi

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as cufile.h declares them;
// header_test.go compares them with it.
var signatures = dltest.Signatures{
	"cuFileHandleRegister":            "#o8 p24",
	"cuFileHandleDeregister":          "-w",
	"cuFileBufRegister":               "#w w i",
	"cuFileBufDeregister":             "#w",
	"cuFileRead":                      "#w w w w w",
	"cuFileWrite":                     "#w w w w w",
	"cuFileDriverOpen":                "#",
	"cuFileDriverClose_v2":            "#",
	"cuFileUseCount":                  "#",
	"cuFileDriverGetProperties":       "#o56",
	"cuFileDriverSetPollMode":         "#b w",
	"cuFileDriverSetMaxDirectIOSize":  "#w",
	"cuFileDriverSetMaxCacheSize":     "#w",
	"cuFileDriverSetMaxPinnedMemSize": "#w",
	"cuFileBatchIOSetUp":              "#o8 i",
	"cuFileBatchIOSubmit":             "#w i p64 i",
	"cuFileBatchIOGetStatus":          "#w i o4=1 o24 p16",
	"cuFileBatchIOCancel":             "#w",
	"cuFileBatchIODestroy":            "-w",
	"cuFileReadAsync":                 "#w w p8 p8 p8 p8 w",
	"cuFileWriteAsync":                "#w w p8 p8 p8 p8 w",
	"cuFileStreamRegister":            "#w i",
	"cuFileStreamDeregister":          "#w",
	"cuFileGetVersion":                "#o4=1150",
	"cuFileGetParameterSizeT":         "#i o8",
	"cuFileGetParameterBool":          "#i o1=1",
	"cuFileGetParameterString":        "#i o4=4276803 i", // ABC
	"cuFileSetParameterSizeT":         "#i w",
	"cuFileSetParameterBool":          "#i b",
	"cuFileSetParameterString":        "#i s",
	"cuFileGetParameterMinMaxValue":   "#i o8=3 o8=9",

	"cuFileSetParameterPosixPoolSlabArray": "#p16 p16 i",
	"cuFileGetParameterPosixPoolSlabArray": "#O16 O16 i",

	"cuFileGetBARSizeInKB": "#i o8",
	"cuFileSetStatsLevel":  "#i",
	"cuFileGetStatsLevel":  "#o4=2",
	"cuFileStatsStart":     "#",
	"cuFileStatsStop":      "#",
	"cuFileStatsReset":     "#",
	"cuFileGetStatsL1":     "#o512",
	"cuFileGetStatsL2":     "#o1024",
	"cuFileGetStatsL3":     "#o5000",
}

// The golden file shows for each method what C received and what the method
// returned; every value below is different, so a swapped argument shows.
func TestRecordedCalls(t *testing.T) {
	var b strings.Builder
	record(t, &b, 0)
	b.WriteString("\n# where the call fails\n")
	record(t, &b, uint64(CUDAFailed(cudadrv.ErrorInvalidContext)))
	dltest.Golden(t, "testdata/record.golden", b.String())
}

func record(t *testing.T, b *strings.Builder, result uint64) {
	rec := dltest.NewRecorder(t, signatures, result)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	rec.Take()

	var a API = lib
	line := func(method string, results ...any) {
		fmt.Fprintf(b, "%-31s %-90s %v\n", method, rec.Take(), results)
	}
	n32, r := a.GetVersion()
	line("GetVersion", n32, r)
	line("DriverOpen", a.DriverOpen())
	line("DriverClose", a.DriverClose())
	line("UseCount", a.UseCount())
	props := new(DrvProps)
	r = a.DriverGetProperties(props)
	line("DriverGetProperties", fmt.Sprintf("%#x %#x", props.MajorVersion, props.MaxBatchIOTimeoutMillis), r)
	line("DriverSetPollMode", a.DriverSetPollMode(true, 11))
	line("DriverSetMaxDirectIOSize", a.DriverSetMaxDirectIOSize(12))
	line("DriverSetMaxCacheSize", a.DriverSetMaxCacheSize(13))
	line("DriverSetMaxPinnedMemSize", a.DriverSetMaxPinnedMemSize(14))
	kb, r := a.GetBARSizeInKB(5)
	line("GetBARSizeInKB", kb, r)

	h, r := a.HandleRegister(&Descr{Type: OpaqueFD, FD: 77, FSOps: 0xf5})
	line("HandleRegister", uintptr(h), r)
	a.HandleDeregister(0xa1)
	line("HandleDeregister")
	line("BufRegister", a.BufRegister(0xd1, 4096, RDMARelaxedOrdering))
	line("BufDeregister", a.BufDeregister(0xd1))
	n, err := a.Read(0xa1, 0xd1, 100, 200, 300)
	line("Read", n, err)
	n, err = a.Write(0xa1, 0xd1, 100, -200, 300)
	line("Write", n, err)
	size, fileOffset, devOffset, done := uintptr(0x11), int64(0x22), int64(0x33), int64(0x44)
	line("ReadAsync", a.ReadAsync(0xa1, 0xd1, &size, &fileOffset, &devOffset, &done, 0x51))
	line("WriteAsync", a.WriteAsync(0xa1, 0xd1, &size, &fileOffset, &devOffset, &done, 0x51))
	line("StreamRegister", a.StreamRegister(0x51, FixedFileSize))
	line("StreamDeregister", a.StreamDeregister(0x51))

	batch, r := a.BatchIOSetUp(8)
	line("BatchIOSetUp", uintptr(batch), r)
	line("BatchIOSubmit", a.BatchIOSubmit(0xb1, []IOParams{{Mode: BatchMode, DevPtrBase: 0xd1, FileOffset: 2, DevOffset: 3, Size: 4,
		Handle: 0xa1, Opcode: OpWrite, Cookie: 7}}, 6))
	events := make([]IOEvents, 3)
	nr, r := a.BatchIOGetStatus(0xb1, 2, events, &Timespec{Sec: 1, Nsec: 2})
	line("BatchIOGetStatus", nr, fmt.Sprintf("%#x", events[0].Cookie), r)
	nr, r = a.BatchIOGetStatus(0xb1, 2, events, nil)
	line("BatchIOGetStatus", nr, r)
	line("BatchIOCancel", a.BatchIOCancel(0xb1))
	a.BatchIODestroy(0xb1)
	line("BatchIODestroy")

	line("SetParameterSizeT", a.SetParameterSizeT(IOBatchSize, 99))
	line("SetParameterBool", a.SetParameterBool(ParallelIO, true))
	line("SetParameterBool", a.SetParameterBool(UsePCIP2PDMA, false))
	line("SetParameterString", a.SetParameterString(LogDir, "/logs"))
	v, r := a.GetParameterSizeT(MaxIOThreads)
	line("GetParameterSizeT", v, r)
	on, r := a.GetParameterBool(SkipTopologyDetection)
	line("GetParameterBool", on, r)
	text, r := a.GetParameterString(EnvLogfilePath)
	line("GetParameterString", text, r)
	lo, hi, r := a.GetParameterMinMaxValue(PollThresholdSizeKB)
	line("GetParameterMinMaxValue", lo, hi, r)
	sizes, counts := []uintptr{4, 5}, []uintptr{6, 7}
	line("SetParameterPosixPoolSlabArray", a.SetParameterPosixPoolSlabArray(sizes, counts))
	r = a.GetParameterPosixPoolSlabArray(sizes, counts)
	line("GetParameterPosixPoolSlabArray", fmt.Sprintf("%#x %#x", sizes, counts), r)

	line("SetStatsLevel", a.SetStatsLevel(3))
	n32, r = a.GetStatsLevel()
	line("GetStatsLevel", n32, r)
	line("StatsStart", a.StatsStart())
	line("StatsStop", a.StatsStop())
	line("StatsReset", a.StatsReset())
	one, two, three := new(StatsLevel1), new(StatsLevel2), new(StatsLevel3)
	r = a.GetStatsL1(one)
	line("GetStatsL1", fmt.Sprintf("%#x", one.LastBatchWriteBytes), r)
	r = a.GetStatsL2(two)
	line("GetStatsL2", fmt.Sprintf("%#x", two.WriteSizeHist[31]), r)
	r = a.GetStatsL3(three)
	line("GetStatsL3", fmt.Sprintf("%#x", three.PerGPU[15].RegisteredBytes), r)

	require.Empty(t, rec.Uncalled(), "every function of the table has a line")
}

// C has one length for two arrays.
func TestSlabsOfDifferentLengths(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	rec.Take()
	require.Equal(t, InvalidValue, lib.SetParameterPosixPoolSlabArray([]uintptr{1, 2}, []uintptr{1}))
	require.Equal(t, InvalidValue, lib.GetParameterPosixPoolSlabArray([]uintptr{1}, []uintptr{1, 2}))
	require.Empty(t, rec.Take())
}

func TestCallsDoNotAllocate(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	var a API = lib
	words := new([4]int64)
	size := new(uintptr)
	for name, call := range map[string]func(){
		"Read":        func() { _, _ = a.Read(1, 2, 3, 4, 5) },
		"Write":       func() { _, _ = a.Write(1, 2, 3, 4, 5) },
		"ReadAsync":   func() { a.ReadAsync(1, 2, size, &words[1], &words[2], &words[3], 4) },
		"BufRegister": func() { a.BufRegister(1, 2, 3) },
	} {
		require.Zero(t, testing.AllocsPerRun(200, call), name)
	}
}

const transferC = `
#include <errno.h>
#include <stddef.h>
#include <sys/types.h>
/* The size says what to return, the offset what to leave in errno. */
ssize_t cuFileRead(void *h, void *p, size_t size, off_t at, off_t dev) { if (at) errno = (int)at; return (ssize_t)size; }
struct event { void *cookie; int status; size_t ret; };
/* The room comes back as what was transferred. */
long cuFileBatchIOGetStatus(void *b, unsigned min_nr, unsigned *nr, struct event *e, void *timeout) { e[0].ret = *nr; *nr = min_nr; return 0; }
ssize_t cuFileWrite(void *h, const void *p, size_t size, off_t at, off_t dev) { if (at) errno = (int)at; return -(ssize_t)size; }
`

// What Read and Write return is a count, an errno or a code.
func TestTransferResults(t *testing.T) {
	c := dltest.Load(t, transferC)
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(func(name string) (uintptr, bool) {
		if p, ok := c.Symbol(name); ok {
			return p, true
		}
		return rec.Resolve(name)
	}, "composed")
	require.NoError(t, err)
	events := make([]IOEvents, 7)
	nr, r := lib.BatchIOGetStatus(1, 3, events, nil)
	require.Equal(t, Success, r)
	require.EqualValues(t, 3, nr)
	require.EqualValues(t, 7, events[0].Ret, "how many events there is room for")
	for _, x := range []struct {
		returned, errno int64
		n               int64
		err             error
	}{
		{0, 0, 0, nil}, {4096, 0, 4096, nil}, {1 << 40, int64(syscall.EIO), 1 << 40, nil},
		{-1, int64(syscall.ENOSPC), 0, syscall.ENOSPC}, {-1, 0, 0, syscall.EIO},
		{-1, 5017, 0, InvalidMappingRange}, {-5027, 0, 0, HandleNotRegistered}, {-5011, int64(syscall.EIO), 0, CUDADriverError},
	} {
		n, err := lib.Read(1, 2, uintptr(x.returned), x.errno, 0)
		require.Equal(t, x.n, n, x)
		require.Equal(t, x.err, err, x)
		if x.returned <= 0 {
			n, err = lib.Write(1, 2, uintptr(-x.returned), x.errno, 0)
			require.Equal(t, x.n, n, x)
			require.Equal(t, x.err, err, x)
		}
	}
}

func TestTransferred(t *testing.T) {
	for v, want := range map[int64]error{
		-1: syscall.EIO, -int64(syscall.ENOSPC): syscall.ENOSPC, -5027: HandleNotRegistered, -5044: IOError,
	} {
		n, err := Transferred(v)
		require.Zero(t, n)
		require.Equal(t, want, err, v)
	}
	n, err := Transferred(1 << 33)
	require.NoError(t, err)
	require.EqualValues(t, 1<<33, n)
}

func TestSymbolTable(t *testing.T) {
	seen := map[string]bool{}
	for f := range NumFuncs {
		require.True(t, strings.HasPrefix(f.Name(), "cuFile"), "function %d", int(f))
		require.GreaterOrEqual(t, f.Since(), int32(1000), f.Name())
		require.LessOrEqual(t, f.Since(), int32(1150), f.Name())
		require.False(t, seen[f.Name()], f.Name())
		require.Contains(t, signatures, f.Name())
		seen[f.Name()] = true
	}
	require.Len(t, signatures, int(NumFuncs))
}

func TestOpenRefusesOldLibrary(t *testing.T) {
	sigs := dltest.Signatures{}
	for f := range NumFuncs {
		if f.Since() < minVersion {
			sigs[f.Name()] = signatures[f.Name()]
		}
	}
	_, err := newLib(dltest.NewRecorder(t, sigs, 0).Resolve, "/lib/libcufile.so.1.6")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "cuFile at /lib/libcufile.so.1.6: Chorus needs 1.7 or newer")
	require.Equal(t, []string{"cuFileReadAsync", "cuFileWriteAsync", "cuFileStreamRegister", "cuFileStreamDeregister"}, e.Missing)
}

// A library of the oldest version that is accepted lacks what came later.
func TestMissingFunctions(t *testing.T) {
	sigs := dltest.Signatures{}
	for f := range NumFuncs {
		if f.Since() <= minVersion {
			sigs[f.Name()] = signatures[f.Name()]
		}
	}
	rec := dltest.NewRecorder(t, sigs, 0)
	lib, err := newLib(rec.Resolve, "/lib/libcufile.so.0")
	require.NoError(t, err)
	require.Equal(t, int32(minVersion), lib.Version())
	rec.Take()
	require.True(t, lib.Has(FuncReadAsync))
	require.False(t, lib.Has(FuncGetVersion))
	_, r := lib.GetVersion()
	require.Equal(t, MissingSymbol, r)
	require.Equal(t, MissingSymbol, lib.SetParameterBool(ParallelIO, true))
	require.Equal(t, MissingSymbol, lib.SetParameterPosixPoolSlabArray(nil, nil))
	_, _, r = lib.GetParameterMinMaxValue(IOBatchSize)
	require.Equal(t, MissingSymbol, r)
	require.Equal(t, MissingSymbol, lib.GetStatsL3(new(StatsLevel3)))
	require.Empty(t, rec.Take())
}

func TestVersionText(t *testing.T) {
	require.Equal(t, "1.15", VersionText(1150))
	require.Equal(t, "1.7", VersionText(1070))
}
