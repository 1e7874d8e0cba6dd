// Package dl finds shared libraries and calls their C functions without a C
// compiler and without allocating. It is the only importer of purego.
//
// Open searches for a library as described by its Spec, and reports every path that it
// tried. A call is made through a Frame from a pool:
//
//	f := dl.Get()
//	p, r := f.Out().In(bytes, uintptr(stream)).Do1(fn) // int fn(void **, size_t, stream)
//
// Libraries are never closed: the drivers behind them start threads and
// register exit handlers.
package dl
