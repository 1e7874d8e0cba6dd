// Package forgive has programs that are wrong on GPUs, and programs that look wrong and are right.
// Its tests run each of them in a process of its own, on virtual devices and, if there are GPUs, on
// CUDA, and compare how they end. Virtual devices must not forgive what GPUs do not.
//
// A case is a row of a table: cases_*_test.go have one table for each area. A process that does
// not end within the limit hangs. Virtual devices may report a hang as an error.
package forgive
