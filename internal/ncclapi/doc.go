// Package ncclapi is the host API of NCCL: one method for each C function, with
// the C names less their nccl prefix, C widths and no policy.
//
// API is the interface that package nccl programs against. Lib calls the loaded
// libnccl.so.2; the virtual devices implement the same interface in host
// memory. A function that the loaded library lacks returns MissingSymbol, and
// Has tells beforehand.
package ncclapi
