//go:build !cgo || nonvml

package nvml

// bind binds the calls by internal/dl.
var bind = bindTable
