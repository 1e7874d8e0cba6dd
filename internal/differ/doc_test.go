// Package differ tests that programs do the same on virtual devices and on CUDA.
//
// A program is plain data: a list of operations over numbered objects. The
// generator draws programs from a seed and runs a model beside them, which predicts
// the error of each operation and the contents of memory. The runner executes a
// program over the public API. On a machine without a GPU the
// test compares virtual devices with the model; with a GPU it compares virtual
// devices, CUDA and the model. A program that differs is shrunk and printed as
// Go.
//
// Files:
//   - program: programs and operations as plain data
//   - kinds: the table of all operations; ops_*: the operations of one package each
//   - clock, model, capture: the model's order, memory and captures
//   - generate: draws programs
//   - run, errors: executes a program, and names its errors
//   - compare, explained: differences
//   - shrink, print: shrinks a program, and prints it as Go
//   - async, async_run: host-asynchronous programs of several ranks and goroutines
//   - worker, differ: processes that run many programs, and the test
package differ
