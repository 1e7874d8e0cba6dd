package cublasapi

import "strconv"

// Result is cublasStatus_t. Its Error text is the C name.
type Result int32

// The results, with the values of cublas_api.h.
const (
	Success         Result = 0
	NotInitialized  Result = 1
	AllocFailed     Result = 3
	InvalidValue    Result = 7
	ArchMismatch    Result = 8
	MappingError    Result = 11
	ExecutionFailed Result = 13
	InternalError   Result = 14
	NotSupported    Result = 15
	LicenseError    Result = 16
)

var names = map[Result]string{
	Success: "CUBLAS_STATUS_SUCCESS", NotInitialized: "CUBLAS_STATUS_NOT_INITIALIZED",
	AllocFailed: "CUBLAS_STATUS_ALLOC_FAILED", InvalidValue: "CUBLAS_STATUS_INVALID_VALUE",
	ArchMismatch: "CUBLAS_STATUS_ARCH_MISMATCH", MappingError: "CUBLAS_STATUS_MAPPING_ERROR",
	ExecutionFailed: "CUBLAS_STATUS_EXECUTION_FAILED", InternalError: "CUBLAS_STATUS_INTERNAL_ERROR",
	NotSupported: "CUBLAS_STATUS_NOT_SUPPORTED", LicenseError: "CUBLAS_STATUS_LICENSE_ERROR",
}

// Error returns the C name, such as CUBLAS_STATUS_ALLOC_FAILED.
func (r Result) Error() string {
	if s, ok := names[r]; ok {
		return s
	}
	return "cublasStatus " + strconv.Itoa(int(r))
}
