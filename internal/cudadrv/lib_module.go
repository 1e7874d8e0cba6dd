package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) ModuleLoadData(image []byte) (Module, Result) {
	if n := len(image); n == 0 || image[n-1] != 0 {
		// PTX is text that ends at its NUL; a cubin knows its own size.
		image = append(image[:n:n], 0)
	}
	m, r := l.Call1(fnModuleLoadData, dl.Get().Out().Ptr(unsafe.Pointer(&image[0])))
	return Module(m), r
}

func (l *Lib) ModuleUnload(m Module) Result { return l.Call(fnModuleUnload, dl.Get().In(uintptr(m))) }

func (l *Lib) ModuleGetFunction(m Module, name string) (Function, Result) {
	f, r := l.Call1(fnModuleGetFunction, dl.Get().Out().In(uintptr(m)).String(name))
	return Function(f), r
}

func (l *Lib) LaunchKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result {
	return l.Call(fnLaunchKernel, launchFrame(f, grid, block, sharedBytes, s, params).In(0)) // no extra
}

func (l *Lib) LaunchCooperativeKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result {
	return l.Call(fnLaunchCooperativeKernel, launchFrame(f, grid, block, sharedBytes, s, params))
}

func launchFrame(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) *dl.Frame {
	return dl.Get().In(uintptr(f),
		uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]),
		uintptr(block[0]), uintptr(block[1]), uintptr(block[2]),
		uintptr(sharedBytes), uintptr(s)).Ptr(params)
}

func (l *Lib) FuncGetAttribute(a FuncAttribute, f Function) (int32, Result) {
	v, r := l.Call1(fnFuncGetAttribute, dl.Get().Out().In(uintptr(a), uintptr(f)))
	return int32(v), r
}

func (l *Lib) FuncSetAttribute(f Function, a FuncAttribute, value int32) Result {
	return l.Call(fnFuncSetAttribute, dl.Get().In(uintptr(f), uintptr(a), uintptr(value)))
}

func (l *Lib) OccupancyMaxActiveBlocksPerMultiprocessor(f Function, blockSize int32, sharedBytes uintptr) (int32, Result) {
	n, r := l.Call1(fnOccupancyMaxActiveBlocksPerMultiprocessor, dl.Get().Out().In(uintptr(f), uintptr(blockSize), sharedBytes))
	return int32(n), r
}

func (l *Lib) OccupancyMaxPotentialBlockSize(f Function, sharedBytes uintptr, limit int32) (minGrid, block int32, r Result) {
	v, w, r := l.Call2(fnOccupancyMaxPotentialBlockSize, dl.Get().Out().Out().In(uintptr(f), 0, sharedBytes, uintptr(limit))) // no callback
	return int32(v), int32(w), r
}
