// Package differ tests that programs do the same on virtual devices and on CUDA.
//
// A program is plain data: a list of operations over numbered objects. The
// generator draws programs from a seed and keeps a model beside them, which says
// what each operation returns and what memory holds afterwards. The runner
// carries a program out over the public API. On a machine without a GPU the
// test compares virtual devices with the model; with a GPU it compares virtual
// devices, CUDA and the model. A program that differs is shrunk and printed as
// Go.
//
// Files:
//   - program: what a program is
//   - kinds: the table of all operations; ops_*: the operations of one package each
//   - clock, model, capture: what the model knows of order, memory and captures
//   - generate: draws programs
//   - run, errors: carries a program out, and names its errors
//   - compare: what counts as a difference
//   - shrink, print: makes a program small, and Go of it
//   - worker, differ: processes that run many programs, and the test
package differ
