package nvtx

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// state tells whether a profiler is attached. Without a profiler, functions read
// nothing else.
var state atomic.Uint32

const (
	unknown uint32 = iota // before the first call
	detached
	attached
)

var attachError error

var attachOnce = sync.OnceFunc(func() {
	ok, err := attach()
	attachError = err
	if ok {
		state.Store(attached)
	} else {
		state.Store(detached)
	}
})

// attach implements the C header of NVTX 3: it loads the library named by the
// environment and calls its InitializeInjectionNvtx2, which requests tables and
// stores its functions in them.
func attach() (bool, error) {
	if env.NVTXInjection.Value() == "" {
		return false, nil
	}
	lib, err := dl.Open(&dl.Spec{Name: "the NVTX tool", Env: env.NVTXInjection})
	if err != nil {
		return false, fmt.Errorf("nvtx: attach: %w", err)
	}
	const symbol = "InitializeInjectionNvtx2"
	start, ok := lib.Symbol(symbol)
	if !ok {
		return false, fmt.Errorf("nvtx: attach: %s has no %s: it is not an NVTX tool", lib.Path(), symbol)
	}
	if dl.Get().In(export()).Do(start) == 0 {
		return false, fmt.Errorf("nvtx: attach: %s of %s failed: the tool does not report a reason", symbol, lib.Path())
	}
	return true, nil
}

// The modules of NVTX 3. Tools may fill all modules, but this package calls only
// functions of the core.
const (
	core    = 1
	modules = 7
)

// The functions of the core, NvtxCallbackIdCore.
const (
	markA       = 2
	rangeStartA = 5
	rangeEnd    = 7
	rangePushA  = 9
	rangePop    = 11
)

// counts holds the length of each module's table, including the unused first entry.
var counts = [modules]uint32{core: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7} // CUDA, OpenCL, the CUDA runtime, domains, locks

const maxCount = 16

// Memory that tools read and write is in package variables, which never move and
// live as long as the process.
var (
	slots  [modules][maxCount]uintptr      // functions of the tool
	tables [modules][maxCount + 1]*uintptr // addresses for the tool to store its functions

	callbacks   exportCallbacks
	versionInfo exportVersionInfo
)

// exportCallbacks is NvtxExportTableCallbacks.
type exportCallbacks struct {
	size                   uintptr
	getModuleFunctionTable uintptr
}

// exportVersionInfo is NvtxExportTableVersionInfo.
type exportVersionInfo struct {
	size                    uintptr
	version, _              uint32
	setInjectionNvtxVersion uintptr
}

// Ids of the tables, NvtxExportTableID.
const (
	callbacksTable = 1
	versionTable   = 3
)

// export fills the tables and returns the C function that provides them,
// NvtxGetExportTableFunc_t.
func export() uintptr {
	for m := range tables {
		for i := 1; i < int(counts[m]); i++ {
			tables[m][i] = &slots[m][i]
		}
	}
	callbacks = exportCallbacks{size: unsafe.Sizeof(callbacks), getModuleFunctionTable: dl.Callback(getModuleFunctionTable)}
	versionInfo = exportVersionInfo{size: unsafe.Sizeof(versionInfo), version: 3, setInjectionNvtxVersion: dl.Callback(func(uint32) {})}
	return dl.Callback(func(id uint32) uintptr {
		switch id {
		case callbacksTable:
			return uintptr(unsafe.Pointer(&callbacks))
		case versionTable:
			return uintptr(unsafe.Pointer(&versionInfo))
		}
		return 0
	})
}

func getModuleFunctionTable(module uint32, table *uintptr, size *uint32) int32 {
	if module == 0 || module >= modules {
		return 0
	}
	if size != nil {
		*size = counts[module]
	}
	if table != nil {
		*table = uintptr(unsafe.Pointer(&tables[module]))
	}
	return 1
}
