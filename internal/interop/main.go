// Command interop is a shared library for testdata/interop.py, which checks that tensors go
// between Chorus and PyTorch or CuPy in one process and between processes, without a copy:
//
//	CGO_ENABLED=1 go build -buildmode=c-shared -o libinterop.so ./internal/interop
//	python3 internal/interop/testdata/interop.py libinterop.so
//
// As a program it does nothing.
package main

func main() {}
