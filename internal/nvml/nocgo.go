//go:build !cgo || nonvml

package nvml

// bind makes calls by internal/dl.
var bind = bindTable
